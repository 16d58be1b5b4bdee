from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.errors import ConfigError
from common.signing import PlanSigner, is_signed_by


def test_a_plan_is_signed_by_one_key_alone(tmp_path: Path) -> None:
    signer, other = PlanSigner.create(tmp_path / "key"), PlanSigner.create(tmp_path / "other")
    signature = signer.sign(b"plan")
    assert PlanSigner.load(tmp_path / "key").sign(b"plan") == signature
    assert is_signed_by(signer.public_key, b"plan", signature)
    for key, plan, shown in [
        (other.public_key, b"plan", signature),
        (signer.public_key, b"plan!", signature),
        (signer.public_key, b"plan", signature[:-1]),
        ("no key", b"plan", signature),
    ]:
        assert not is_signed_by(key, plan, shown)


def test_keys_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the server's signing key"):
        PlanSigner.load(tmp_path / "absent")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="cannot read the server's signing key"):
        PlanSigner.load(tmp_path / "junk")
    pem = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "of another kind").write_bytes(pem)
    with pytest.raises(ConfigError, match=r"expected an Ed25519 key in .*, got X25519PrivateKey"):
        PlanSigner.load(tmp_path / "of another kind")
    with pytest.raises(ConfigError, match="exists already"):
        PlanSigner.create(tmp_path / "junk")
