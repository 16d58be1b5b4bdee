"""How a shim and a site's daemon find and trust each other: an address, and TLS keys or a token where needed."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.errors import ConfigError

TOKEN_KEY = "fedsieve-token"
MAX_MESSAGE_BYTES = 1 << 28  # 256 MiB: a model of 64 million parameters as float32
_SIZE_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# A peer that has vanished without a word is noticed within a minute, also in the middle of a long training.
_SHIM_OPTIONS = (
    *_SIZE_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a daemon that was restarted is found soon
)
DAEMON_OPTIONS = (
    *_SIZE_LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a second daemon at the same address would get every other plan
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where a daemon listens and what it takes to be let in.

    ``address`` is HOST:PORT or unix:PATH. With ``ca``, ``certificate`` and ``key`` both sides prove who they are
    (mutual TLS). A ``token`` is a secret file that both can read; where others could listen in it travels under TLS
    too: the daemon then has a ``certificate`` and its ``key``, the shim the ``ca`` that signed it.
    """

    address: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a certificate and its key go together: give both, or neither")

    @classmethod
    def of_node(cls, node_config: Mapping[str, object]) -> "Access | None":
        """Return what a SuperNode's node config says of its site; None where it names none."""
        address = node_config.get("site")
        if address is None:
            return None
        files = {name: node_config.get(f"site-{name}") for name in ("ca", "certificate", "key", "token")}
        return cls(address=str(address), **{name: Path(str(file)) for name, file in files.items() if file is not None})

    @property
    def local(self) -> bool:
        """Whether nobody outside of this host can reach the address."""
        host = self.address.rsplit(":", 1)[0].strip("[]")
        return self.address.startswith("unix:") or host in ("localhost", "127.0.0.1", "::1")

    def secret(self) -> str | None:
        """Return the token, if there is one."""
        if self.token is None:
            return None
        secret = _read(self.token, "token").decode().strip()
        if len(secret) < 32:
            raise ConfigError(f"expected a token of at least 32 characters in {self.token}, got {len(secret)}")
        return secret

    def open_channel(self) -> grpc.Channel:
        """Connect, as a shim does; an address that others can listen in on needs TLS."""
        if self.ca is None:
            if self.certificate is not None or not self.local:
                raise ConfigError(
                    f"to reach a site at {self.address} under TLS, name the CA's certificate that proves who answers "
                    "there (site-ca in the node config, --tls-ca)"
                )
            return grpc.insecure_channel(self.address, options=_SHIM_OPTIONS)
        credentials = grpc.ssl_channel_credentials(_read(self.ca, "CA's certificate"), *self._own_proof())
        return grpc.secure_channel(self.address, credentials, options=_SHIM_OPTIONS)

    def listen(self, server: grpc.Server) -> None:
        """Have ``server`` listen; an address that others can reach needs TLS, and a proof of who asks."""
        key, certificate = self._own_proof()
        if key is None and self.ca is not None:
            raise ConfigError("mutual TLS needs three files: the CA's certificate, the own certificate and its key")
        if key is None and not self.local:
            raise ConfigError(
                f"{self.address} can be reached from other hosts: give mutual TLS (--tls-ca, --tls-certificate, "
                "--tls-key) or a certificate and a token (--tls-certificate, --tls-key, --token), or listen on "
                "127.0.0.1 or a unix socket"
            )
        if key is not None and self.ca is None and self.token is None:
            raise ConfigError("TLS alone lets everybody in: give the CA of those who may ask (--tls-ca), or a --token")
        try:
            if key is None:
                with _closed_to_strangers():
                    server.add_insecure_port(self.address)
                return
            ca = None if self.ca is None else _read(self.ca, "CA's certificate")
            credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=ca is not None)
            server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self.address}, perhaps because another daemon does: {error}"
            ) from error

    def _own_proof(self) -> tuple[bytes | None, bytes | None]:
        """Return the own key and certificate, if there are any."""
        if self.key is None or self.certificate is None:
            return None, None
        return _read(self.key, "key"), _read(self.certificate, "certificate")


@contextmanager
def _closed_to_strangers() -> Iterator[None]:
    """Have files, such as a unix socket, made for their owner and group alone, whatever the umask."""
    before = os.umask(0o007)
    os.umask(before | 0o007)
    try:
        yield
    finally:
        os.umask(before)


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from error
