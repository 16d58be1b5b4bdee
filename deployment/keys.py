"""The keys of a deployment: what the server's operator makes, and what each site makes for itself.

::

    SERVER/                       stays with the server's operator
      ca.key                      signs the server's certificate; needed again only to renew it: keep it off line
      link/                       what the SuperLink reads: ca.crt, server.crt, server.key, superexec.secret
      app/                        what SuperExec and the ServerApp read: ca.crt, superexec.secret, plan.key
      public/                     what sites are given: ca.crt, plan.pub

    SITE/                         stays with the site's operator; nothing in it has to be signed by anybody
      node.pub                    what the server's operator registers
      node/                       what SuperNode and shim read: ca.crt, node.key, daemon-ca.crt, shim.crt, shim.key
      daemon/                     what the site's daemon reads: daemon-ca.crt, daemon.crt, daemon.key; and
                                  operator.crt, operator.key for 'fedsieve site status'

``plan.key`` signs plans, ``plan.pub`` is its public half. Shim and daemon prove themselves to each other with
certificates of a CA of the site's own, whose key is thrown away once it has signed them: no server and no other site
can make another.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import ConfigError
from common.signing import PlanSigner

_CA_DAYS = 3650


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Where the keys of a server are."""

    folder: Path

    @property
    def link(self) -> Path:
        """What the SuperLink reads."""
        return self.folder / "link"

    @property
    def app(self) -> Path:
        """What SuperExec and the ServerApp read."""
        return self.folder / "app"

    @property
    def public(self) -> Path:
        """What sites are given."""
        return self.folder / "public"

    @property
    def ca(self) -> Path:
        """The certificate that proves the server's."""
        return self.public / "ca.crt"

    @property
    def plan_key(self) -> Path:
        """The key that signs plans."""
        return self.app / "plan.key"

    @classmethod
    def create(cls, folder: Path, hosts: Sequence[str], days: int) -> "ServerKeys":
        """Make a CA, a certificate for a SuperLink at ``hosts``, the key that signs plans and SuperExec's secret."""
        _check(hosts, days)
        keys = cls(_new_folder(folder))
        authority = _Authority.create("fedsieve server CA", _CA_DAYS)
        _write(folder / "ca.key", authority.key_bytes(), secret=True)
        for part in (keys.link, keys.app, keys.public):
            part.mkdir()
            _write(part / "ca.crt", authority.certificate_bytes())
        authority.issue(keys.link / "server", "fedsieve server", hosts, days, server=True)
        secret = secrets.token_hex(32).encode()
        for part in (keys.link, keys.app):
            _write(part / "superexec.secret", secret, secret=True)
        signer = PlanSigner.create(keys.plan_key)
        _write(keys.public / "plan.pub", f"{signer.public_key}\n".encode())
        return keys

    def renew(self, hosts: Sequence[str], days: int) -> None:
        """Replace the server's certificate by a new one of the same CA; sites notice nothing."""
        _check(hosts, days)
        authority = _Authority.load(self.folder / "ca.key", self.ca)
        for old in (self.link / "server.crt", self.link / "server.key"):
            old.unlink(missing_ok=True)
        authority.issue(self.link / "server", "fedsieve server", hosts, days, server=True)


@dataclass(frozen=True, slots=True)
class SiteKeys:
    """Where the keys of a site are."""

    folder: Path

    @property
    def node(self) -> Path:
        """What the SuperNode and its shim read."""
        return self.folder / "node"

    @property
    def daemon(self) -> Path:
        """What the site's daemon reads."""
        return self.folder / "daemon"

    @property
    def public(self) -> Path:
        """The node's public key: what the server's operator registers."""
        return self.folder / "node.pub"

    @classmethod
    def create(cls, folder: Path, server_ca: Path, hosts: Sequence[str], days: int) -> "SiteKeys":
        """Make a site's keys; its daemon will answer at ``hosts``. ``server_ca`` is what the server gave out."""
        _check(hosts, days)
        _require_certificate(server_ca)
        keys = cls(_new_folder(folder))
        keys.node.mkdir()
        keys.daemon.mkdir()
        _write(keys.node / "ca.crt", server_ca.read_bytes())
        node = ec.generate_private_key(ec.SECP384R1())  # the curve that Flower documents
        _write(keys.node / "node.key", node.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), True)
        _write(keys.public, node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
        authority = _Authority.create(f"fedsieve site CA {folder.name}", days)
        for part in (keys.node, keys.daemon):
            _write(part / "daemon-ca.crt", authority.certificate_bytes())
        authority.issue(keys.daemon / "daemon", "fedsieve site daemon", hosts, days, server=True)
        authority.issue(keys.daemon / "operator", "fedsieve site operator", (), days, server=False)
        authority.issue(keys.node / "shim", "fedsieve shim", (), days, server=False)
        return keys


class _Authority:
    """A certificate authority."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, name: str, days: int) -> "_Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        usage = _usage(signs_certificates=True)
        certificate = (
            _builder(subject, subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, key_file: Path, certificate_file: Path) -> "_Authority":
        try:
            key = load_pem_private_key(key_file.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot read the CA in {key_file}, {certificate_file}: {error}; bring ca.key back from its safe place"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
            raise ConfigError(f"{key_file} is not the key of the CA in {certificate_file}")
        return cls(key, certificate)

    def key_bytes(self) -> bytes:
        return _pem(self._key)

    def certificate_bytes(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, stem: Path, name: str, hosts: Sequence[str], days: int, *, server: bool) -> None:
        """Write STEM.crt and STEM.key, of a ``server`` at ``hosts`` or of a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            _builder(_name(name), self._certificate.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write(stem.with_suffix(".key"), _pem(key), secret=True)
        _write(stem.with_suffix(".crt"), certificate.public_bytes(Encoding.PEM))


def _check(hosts: Sequence[str], days: int) -> None:
    """Refuse what no certificate can hold, before anything is written."""
    for host in hosts:
        _host(host)
    if not 1 <= days <= _CA_DAYS:
        raise ConfigError(f"expected a certificate to be good for 1 to {_CA_DAYS} days, got {days}")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other organisations
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or "/" in host or ":" in host or not host.isascii():
        raise ConfigError(f"expected a host name or an IP address without a port, got {host!r}")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _require_certificate(path: Path) -> None:
    try:
        x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the server's CA certificate {path}: {error}; it is ca.crt of the folder 'public' that "
            "'fedsieve keys init' made and the server's operator gave out"
        ) from error


def _new_folder(folder: Path) -> Path:
    """Make a folder that its owner alone can enter; keys are never written over older ones."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already: keys are never replaced; choose another folder") from None
    return folder


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    mode = 0o600 if secret else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
