"""Signed plans: a site can tell its server's plans from anybody else's.

Keys are Ed25519. The server signs the bytes of each plan; a site's policy names the public key that it obeys, as 64
hexadecimal digits.
"""

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from common.errors import ConfigError

_CONTEXT = b"fedsieve/plan/1\0"  # a signature of something else under the same key is not one of a plan


class PlanSigner:
    """A server's key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls, path: Path) -> "PlanSigner":
        """Make a new key and write it to ``path``, readable by its owner alone; never over an old one."""
        signer = cls(Ed25519PrivateKey.generate())
        pem = signer._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(pem)
        except FileExistsError:
            raise ConfigError(f"{path} exists already: remove it, or choose another place for the new key") from None
        return signer

    @classmethod
    def load(cls, path: Path) -> "PlanSigner":
        """Read a key that ``create`` wrote."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"cannot read the server's signing key {path}: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"expected an Ed25519 key in {path}, got {type(key).__name__}")
        return cls(key)

    @property
    def public_key(self) -> str:
        """The public key: what a site's policy names."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, plan: bytes) -> bytes:
        """Return the signature of a plan."""
        return self._key.sign(_CONTEXT + plan)


def is_signed_by(public_key: str, plan: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` is that of ``plan`` under ``public_key``."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, _CONTEXT + plan)
    except (InvalidSignature, ValueError):
        return False
    return True
