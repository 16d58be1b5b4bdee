"""``fedsieve keys``: what is made, for whom and how long, and who may read it."""

import datetime
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from client.policy import SitePolicy
from common.errors import ConfigError
from common.signing import PlanSigner
from deployment.keys import ServerKeys, SiteKeys
from simulations.cli import main

HOUR, YEARS_2, YEARS_10 = datetime.timedelta(hours=1), datetime.timedelta(days=730), datetime.timedelta(days=3650)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> list[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def make(folder: Path) -> tuple[Path, Path]:
    server, site = folder / "server", folder / "site-1"
    assert main(["keys", "init", str(server), "--host", "link.example.org", "--host", "10.0.0.7"]) == 0
    assert main(["keys", "add-site", str(site), "--server", str(server / "public"), "--host", "daemon"]) == 0
    return server, site


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path)


@pytest.fixture
def _no_umask() -> Iterator[None]:
    """Files have the rights that they are made with."""
    before = os.umask(0)
    yield
    os.umask(before)


def check(path: Path, name: str, issuer: Path, days: datetime.timedelta, *, purpose: x509.ObjectIdentifier) -> None:
    """A certificate for one purpose and no other, whose key lies beside it."""
    issued, ca = certificate(path), certificate(issuer)
    issued.verify_directly_issued_by(ca)
    assert issued.subject.rfc4514_string() == f"CN={name}"
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == days + HOUR
    now = datetime.datetime.now(datetime.UTC)
    assert now - HOUR - HOUR / 60 < issued.not_valid_before_utc <= now - HOUR  # clocks of other organisations
    has = {extension.oid._name: (extension.critical, extension.value) for extension in issued.extensions}
    has.pop("subjectAltName", None)
    assert has == {
        "subjectKeyIdentifier": (False, x509.SubjectKeyIdentifier.from_public_key(issued.public_key())),
        "basicConstraints": (True, x509.BasicConstraints(ca=False, path_length=None)),
        "keyUsage": (True, usage("digital_signature")),
        "extendedKeyUsage": (False, x509.ExtendedKeyUsage([purpose])),
        "authorityKeyIdentifier": (False, x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())),
    }
    assert load_pem_private_key(path.with_suffix(".key").read_bytes(), None).public_key() == issued.public_key()


def check_authority(path: Path, name: str, days: datetime.timedelta) -> None:
    """A certificate that signs others, and nothing but what certifies nobody else."""
    ca = certificate(path)
    ca.verify_directly_issued_by(ca)
    assert ca.subject.rfc4514_string() == f"CN={name}"
    assert ca.not_valid_after_utc - ca.not_valid_before_utc == days + HOUR
    assert {extension.oid._name: (extension.critical, extension.value) for extension in ca.extensions} == {
        "subjectKeyIdentifier": (False, x509.SubjectKeyIdentifier.from_public_key(ca.public_key())),
        "basicConstraints": (True, x509.BasicConstraints(ca=True, path_length=0)),
        "keyUsage": (True, usage("key_cert_sign", "crl_sign")),
    }


def usage(*allowed: str) -> x509.KeyUsage:
    every = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    every += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: name in allowed for name in every})


def test_a_server_makes_its_keys(made: tuple[Path, Path]) -> None:
    server, _ = made
    assert {str(file.relative_to(server)) for file in server.rglob("*") if file.is_file()} == {
        *("ca.key", "public/ca.crt", "public/plan.pub", "app/ca.crt", "app/superexec.secret", "app/plan.key"),
        *("link/ca.crt", "link/server.crt", "link/server.key", "link/superexec.secret"),
    }
    ca = server / "public" / "ca.crt"
    check_authority(ca, "fedsieve server CA", YEARS_10)
    assert load_pem_private_key((server / "ca.key").read_bytes(), None).public_key() == certificate(ca).public_key()
    assert (server / "link" / "ca.crt").read_bytes() == (server / "app" / "ca.crt").read_bytes() == ca.read_bytes()
    issued = server / "link" / "server.crt"
    check(issued, "fedsieve server", ca, YEARS_2, purpose=ExtendedKeyUsageOID.SERVER_AUTH)
    assert not certificate(issued).extensions.get_extension_for_class(x509.SubjectAlternativeName).critical
    assert names(issued) == ["link.example.org", "superlink", "localhost", "10.0.0.7", "127.0.0.1"]
    secret = (server / "link" / "superexec.secret").read_text()
    assert len(bytes.fromhex(secret)) == 32 and (server / "app" / "superexec.secret").read_text() == secret
    signer = PlanSigner.load(server / "app" / "plan.key")
    assert (server / "public" / "plan.pub").read_text() == f"{signer.public_key}\n"


def test_a_site_makes_its_keys(made: tuple[Path, Path]) -> None:
    server, site = made
    assert {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()} == {
        *("node.pub", "node/ca.crt", "node/node.key", "node/daemon-ca.crt", "node/shim.crt", "node/shim.key"),
        *("daemon/daemon-ca.crt", "daemon/daemon.crt", "daemon/daemon.key", "daemon/operator.crt"),
        "daemon/operator.key",
    }
    assert (site / "node" / "ca.crt").read_bytes() == (server / "public" / "ca.crt").read_bytes()
    node = load_ssh_private_key((site / "node" / "node.key").read_bytes(), None)
    assert isinstance(node, ec.EllipticCurvePrivateKey) and isinstance(node.curve, ec.SECP384R1)
    assert load_ssh_public_key((site / "node.pub").read_bytes()) == node.public_key()
    assert (site / "node.pub").read_text().endswith("\n")
    ca = site / "daemon" / "daemon-ca.crt"
    check_authority(ca, "fedsieve site CA site-1", YEARS_2)
    assert (site / "node" / "daemon-ca.crt").read_bytes() == ca.read_bytes()
    # A shim cannot pose as a daemon, nor the other way round.
    for path, name, purpose in (
        ("daemon/daemon.crt", "fedsieve site daemon", ExtendedKeyUsageOID.SERVER_AUTH),
        ("daemon/operator.crt", "fedsieve site operator", ExtendedKeyUsageOID.CLIENT_AUTH),
        ("node/shim.crt", "fedsieve shim", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        check(site / path, name, ca, YEARS_2, purpose=purpose)
        hosts = ["daemon", "localhost", "127.0.0.1"] if path == "daemon/daemon.crt" else []
        assert [host for _ in hosts[:1] for host in names(site / path)] == hosts


def test_what_is_printed_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, site = make(tmp_path)
    plan_key = PlanSigner.load(server / "app" / "plan.key").public_key
    assert capsys.readouterr().out.splitlines() == [
        f"made {server} for a SuperLink at link.example.org, 10.0.0.7, superlink, localhost, 127.0.0.1",
        f"give {server}/public to every site; put {server}/ca.key where no server reads it",
        f"made {site}; give {site}/node.pub to the server's operator, and nothing else of it to anybody",
        "the site's policy names the server that it obeys:",
        f'server-key = "{plan_key}"',
    ]
    policy = tmp_path / "site.toml"
    policy.write_text(f'epsilon = 1\ndelta = 1e-5\nmodels = ["dp-cnn-s"]\nserver-key = "{plan_key}"\n')
    assert SitePolicy.load(policy).server_key == plan_key
    assert main(["keys", "renew", str(server)]) == 0
    assert main(["keys", "server", str(tmp_path / "plan.key")]) == 0
    alone = PlanSigner.load(tmp_path / "plan.key").public_key
    assert capsys.readouterr().out.splitlines() == [
        f"replaced {server}/link/server.crt: restart the SuperLink",
        f"wrote {tmp_path}/plan.key: name it in the run config (server-key). "
        "Sites name the public key in their policy:",
        f'server-key = "{alone}"',
    ]


@pytest.mark.usefixtures("_no_umask")
def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    for folder in make(tmp_path / "deep" / "er"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.rglob("*"):
            if file.is_file():
                secret = file.suffix in (".key", ".secret")
                assert stat.S_IMODE(file.stat().st_mode) == (0o600 if secret else 0o644), file
    assert main(["keys", "renew", str(tmp_path / "deep" / "er" / "server")]) == 0
    key = tmp_path / "deep" / "er" / "server" / "link" / "server.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_renewed_certificate_is_of_the_same_ca(made: tuple[Path, Path]) -> None:
    server, _ = made
    issued, ca = server / "link" / "server.crt", server / "public" / "ca.crt"
    before = issued.read_bytes()
    assert main(["keys", "renew", str(server), "--host", "new.example.org", "--days", "7"]) == 0
    assert issued.read_bytes() != before
    assert names(issued) == ["new.example.org", "superlink", "localhost", "127.0.0.1"]
    check(issued, "fedsieve server", ca, datetime.timedelta(days=7), purpose=ExtendedKeyUsageOID.SERVER_AUTH)
    issued.unlink()
    assert main(["keys", "renew", str(server)]) == 0  # also what is lost


def test_what_does_not_renew_leaves_the_certificate(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, _ = made
    before, ca_key = (server / "link" / "server.crt").read_bytes(), (server / "ca.key").read_bytes()
    others = ServerKeys.create(tmp_path / "others", ("localhost",), 1)
    unlike = rsa.generate_private_key(65537, 2048)
    unlike_bytes = unlike.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for key, message in (
        ((others.folder / "ca.key").read_bytes(), "is not the key of the CA in"),
        (unlike_bytes, "is not the key of the CA in"),
        (b"junk", "cannot read the CA in"),
        (None, "bring ca.key back from its safe place"),
    ):
        (server / "ca.key").unlink()
        if key is not None:
            (server / "ca.key").write_bytes(key)
        assert main(["keys", "renew", str(server)]) == 2
        assert message in capsys.readouterr().err
    (server / "ca.key").write_bytes(ca_key)
    for hosts, days in ((["a"], 0), (["a:80"], 1)):
        with pytest.raises(ConfigError, match="expected a"):
            ServerKeys(server).renew(hosts, days)
    assert (server / "link" / "server.crt").read_bytes() == before


@pytest.mark.parametrize("days", [1, 3650])
def test_certificates_are_good_for_one_day_or_ten_years(tmp_path: Path, days: int) -> None:
    keys = ServerKeys.create(tmp_path / "server", ("localhost",), days)
    issued = certificate(keys.link / "server.crt")
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == datetime.timedelta(days=days) + HOUR


@pytest.mark.parametrize(("hosts", "days"), [(("localhost",), 3651), (("localhost",), 0), (("",), 1), (("a/b",), 1)])
def test_what_no_certificate_can_hold_is_refused(tmp_path: Path, hosts: tuple[str, ...], days: int) -> None:
    server = ServerKeys.create(tmp_path / "server", ("localhost",), 1)
    with pytest.raises(ConfigError, match="expected a"):
        ServerKeys.create(tmp_path / "new", hosts, days)
    with pytest.raises(ConfigError, match="expected a"):
        SiteKeys.create(tmp_path / "new", server.ca, hosts, days)
    assert not (tmp_path / "new").exists()


def test_hosts_are_names_and_addresses(tmp_path: Path) -> None:
    keys = ServerKeys.create(tmp_path / "server", ("a.example", "::1", "10.1.2.3"), 1)
    assert names(keys.link / "server.crt") == ["a.example", "::1", "10.1.2.3"]
    with pytest.raises(ConfigError, match="without a port, got 'krankenhäuser'"):
        ServerKeys.create(tmp_path / "new", ("krankenhäuser",), 1)


def test_a_name_is_cut_to_what_a_certificate_holds(tmp_path: Path) -> None:
    server = ServerKeys.create(tmp_path / "server", ("localhost",), 1)
    site = SiteKeys.create(tmp_path / ("x" * 100), server.ca, (), 1)
    (name,) = certificate(site.daemon / "daemon-ca.crt").subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == ("fedsieve site CA " + "x" * 100)[:64]


def test_a_site_needs_the_servers_certificate(made: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "junk.crt").write_text("junk")
    for bad in ("none.crt", "junk.crt"):
        with pytest.raises(ConfigError, match=f"cannot read the server's CA certificate .*{bad}"):
            SiteKeys.create(tmp_path / "new", tmp_path / bad, (), 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["keys", "init", "{tmp}/server"], "exists already: keys are never replaced"),
        (["keys", "init", "{tmp}/new", "--host", "a:80"], "without a port, got 'a:80'"),
        (["keys", "init", "{tmp}/new", "--days", "0"], "1 to 3650 days, got 0"),
        (["keys", "add-site", "{tmp}/site-2", "--server", "{tmp}"], "cannot read the server's plan.pub"),
        (["deploy", "status"], "give --ca"),
        (["deploy", "status", "--ca", "{tmp}/none"], "cannot use the CA certificate"),
        (["deploy", "status", "--ca", "{tmp}/server/public/ca.crt", "--superlink", "127.0.0.1:9"], "is it running"),
        (["deploy", "run", "--ca", "{tmp}/server/public/ca.crt"], "needs a name"),
        (["deploy", "run", "--name", "x", "--set", "round=3"], "did you mean 'rounds'"),
        (["deploy", "run", "--name", "x", "--set", "rounds=0"], "at least 1, got rounds=0"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("FEDSIEVE_CA", raising=False)
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([word.replace("{tmp}", str(tmp_path)) for word in command]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
