"""Between a shim and its site: where TLS is asked for, tokens, and who may use a socket."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from client import channel
from client.channel import Access
from common.errors import ConfigError
from deployment import gate


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/site.sock", True),
        ("localhost:9301", True),
        ("127.0.0.1:9301", True),
        ("[::1]:9301", True),
        ("0.0.0.0:9301", False),
        ("[::]:9301", False),
        ("hospital:9301", False),
    ],
)
def test_what_others_can_listen_in_on_needs_tls(address: str, local: bool) -> None:
    access = Access(address=address)
    assert access.local is local
    if local:
        access.open_channel().close()
        access = replace(access, certificate=Path("own"), key=Path("own"))  # a proof, and nobody to show it to
    with pytest.raises(ConfigError, match="name the CA's certificate"):
        access.open_channel()


def test_what_a_daemon_takes_a_gate_lets_through() -> None:
    assert channel.MAX_MESSAGE_BYTES == gate._MAX_BODY == 256 * 2**20


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the CA's certificate .*none"):
        Access(address="hospital:1", ca=tmp_path / "none").open_channel()


def test_a_short_token_is_none(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32 + "\n")
    assert Access(address="unix:x", token=token).secret() == "t" * 32
    token.write_text("t" * 31 + "\n")
    with pytest.raises(ConfigError, match=r"at least 32 characters in .*, got 31"):
        Access(address="unix:x", token=token).secret()


def test_a_node_names_its_site_in_its_config() -> None:
    assert Access.of_node({"partition-id": 1}) is None
    named = {"site": "unix:x", "site-ca": "a", "site-certificate": "b", "site-key": "c", "site-token": "d"}
    assert Access.of_node(named) == Access(
        address="unix:x", ca=Path("a"), certificate=Path("b"), key=Path("c"), token=Path("d")
    )


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_socket_is_made_for_owner_and_group_at_most(umask: int) -> None:
    before = os.umask(umask)
    try:
        with channel._closed_to_strangers():
            inside = os.umask(0o777)
            os.umask(inside)
        assert inside == umask | 0o007
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
