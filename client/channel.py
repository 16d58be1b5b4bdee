"""How a shim and a site's daemon find and trust each other: an address, and TLS keys or a token where needed."""

from collections.abc import Mapping
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
    (mutual TLS); a ``token`` is a secret file that both can read.
    """

    address: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None

    def __post_init__(self) -> None:
        tls = (self.ca, self.certificate, self.key)
        if any(tls) and not all(tls):
            raise ConfigError("mutual TLS needs three files: the CA's certificate, the own certificate and its key")

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
        """Connect, as a shim does."""
        if self.ca is None or self.certificate is None or self.key is None:
            return grpc.insecure_channel(self.address, options=_SHIM_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            _read(self.ca, "CA's certificate"), _read(self.key, "key"), _read(self.certificate, "certificate")
        )
        return grpc.secure_channel(self.address, credentials, options=_SHIM_OPTIONS)

    def listen(self, server: grpc.Server) -> None:
        """Have ``server`` listen; an address that others can reach needs TLS or a token."""
        if not self.local and self.ca is None and self.token is None:
            raise ConfigError(
                f"{self.address} can be reached from other hosts: give mutual TLS (--tls-ca, --tls-certificate, "
                "--tls-key) or a token file (--token), or listen on 127.0.0.1 or a unix socket"
            )
        try:
            if self.ca is None or self.certificate is None or self.key is None:
                server.add_insecure_port(self.address)
                return
            credentials = grpc.ssl_server_credentials(
                [(_read(self.key, "key"), _read(self.certificate, "certificate"))],
                _read(self.ca, "CA's certificate"),
                require_client_auth=True,
            )
            server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self.address}, perhaps because another daemon does: {error}"
            ) from error


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from error
