"""Keys of a server, and a SuperLink that stands in for one, for the tests that start no processes."""

from collections.abc import Iterator

import pytest

from deployment.keys import ServerKeys
from tests.deployment.servers import FakeLink, serving


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ServerKeys:
    return ServerKeys.create(tmp_path_factory.mktemp("keys") / "server", ("localhost", "127.0.0.1"), 1)


@pytest.fixture(scope="module")
def fake_link(keys: ServerKeys) -> Iterator[FakeLink]:
    fake = FakeLink()
    with serving(fake.app, keys) as fake.address:
        yield fake


@pytest.fixture
def fake(fake_link: FakeLink) -> FakeLink:
    fake_link.forget()
    return fake_link
