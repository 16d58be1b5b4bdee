"""``fedsieve keys`` and the arguments of ``fedsieve deploy``."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from client.policy import SitePolicy
from common.signing import PlanSigner
from simulations.cli import main


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


def test_a_server_and_a_site_make_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, site = make(tmp_path)
    assert names(server / "link" / "server.crt") == [
        "link.example.org",
        "superlink",
        "localhost",
        "10.0.0.7",
        "127.0.0.1",
    ]
    certificate(server / "link" / "server.crt").verify_directly_issued_by(certificate(server / "public" / "ca.crt"))
    ca = certificate(site / "daemon" / "daemon-ca.crt")
    for issued in ("daemon/daemon.crt", "daemon/operator.crt", "node/shim.crt"):
        certificate(site / issued).verify_directly_issued_by(ca)
    # A shim cannot pose as a daemon, nor the other way round.
    purposes = [
        certificate(site / one).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value[0]
        for one in ("daemon/daemon.crt", "node/shim.crt")
    ]
    assert purposes == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    # What is printed can be put into a policy, and is the key that signs plans.
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("server-key"))
    policy = tmp_path / "site.toml"
    policy.write_text(f'epsilon = 1\ndelta = 1e-5\nmodels = ["dp-cnn-s"]\n{line}\n')
    assert SitePolicy.load(policy).server_key == PlanSigner.load(server / "app" / "plan.key").public_key


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    for folder in make(tmp_path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.rglob("*"):
            if file.suffix in (".key", ".secret"):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    given_out = {file.name for file in (tmp_path / "server" / "public").iterdir()}
    assert given_out == {"ca.crt", "plan.pub"}
    # The site's CA has no key any more, and the server's is where no process reads it.
    assert not list((tmp_path / "site-1").rglob("*ca.key"))
    assert [file.parent.name for file in (tmp_path / "server").rglob("ca.key")] == ["server"]


def test_a_renewed_certificate_is_of_the_same_ca(tmp_path: Path) -> None:
    server, _ = make(tmp_path)
    before = (server / "link" / "server.crt").read_bytes()
    assert main(["keys", "renew", str(server), "--host", "new.example.org"]) == 0
    assert (server / "link" / "server.crt").read_bytes() != before
    assert "new.example.org" in names(server / "link" / "server.crt")
    certificate(server / "link" / "server.crt").verify_directly_issued_by(certificate(server / "public" / "ca.crt"))
    (server / "ca.key").unlink()
    assert main(["keys", "renew", str(server)]) == 2


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
