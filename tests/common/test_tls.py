"""PEM files: what is refused and how it is named, and what a change of the files does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from common.config import TlsSettings
from common.errors import BatonError, ConfigError, StartupError
from common.tls import TlsFiles, peer_files, serving_files
from tests.kube.certificates import make_ca, make_leaf

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_ca(folder, "ca")
    for name in ("one", "two"):
        make_leaf(folder, name, "ca", f"/CN={name}", "DNS:fleet.test")
    (folder / "text").write_text("not PEM")
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> dict[str, str]:
    """Copies, to be changed."""
    for name in ("one.crt", "one.key", "ca.crt"):
        shutil.copy(made / name, tmp_path)
    return {"tls_cert": f"{tmp_path}/one.crt", "tls_key": f"{tmp_path}/one.key", "tls_ca": f"{tmp_path}/ca.crt"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tls_cert": None}, "tls_cert"),
        ({"tls_key": None}, "tls_key"),
        ({"tls_cert": "missing"}, "tls_cert: cannot read .*missing: No such file"),
        ({"tls_key": "missing"}, "tls_key: cannot read"),
        ({"tls_ca": "missing"}, "tls_ca: cannot read"),
        ({"tls_cert": "text"}, "tls_cert: .*text holds no PEM certificate"),
        ({"tls_cert": "one.key"}, "tls_cert: .*one.key holds no PEM certificate"),
        ({"tls_key": "text"}, "tls_key: .*text holds no PEM private key"),
        ({"tls_key": "two.key"}, "tls_key: .*two.key is not the key of .*one.crt"),
        ({"tls_ca": "text"}, "tls_ca: .*text holds no PEM certificate"),
    ],
)
def test_what_cannot_be_used_is_named(made: Path, changed: dict[str, str | None], named: str) -> None:
    given: dict[str, str | None] = {"tls_cert": "one.crt", "tls_key": "one.key", "tls_ca": "ca.crt", **changed}
    settings = TlsSettings(**{field: None if name is None else str(made / name) for field, name in given.items()})
    for make in (peer_files, lambda settings: serving_files(settings, settings.tls_ca)):
        with pytest.raises((StartupError, ConfigError), match=rf"^{named}") as caught:
            make(settings)
        assert isinstance(caught.value, BatonError)


def test_a_password_is_not_asked_for(made: Path, tmp_path: Path) -> None:
    key = tmp_path / "locked.key"
    assert os.spawnlp(
        os.P_WAIT, "openssl", "openssl", "ec", "-aes256", "-passout", "pass:secret",
        "-in", str(made / "one.key"), "-out", str(key),
    ) == 0  # fmt: skip
    with pytest.raises(StartupError, match=r"^tls_cert: .* cannot be used"):
        TlsFiles(str(made / "one.crt"), str(key), None)


def test_settings_that_ask_for_tls_without_certificates_are_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tls_server_name"):
        peer_files(TlsSettings(tls_server_name="fleet.test"))
    with pytest.raises(ConfigError, match=r"^tls_client_ca"):
        serving_files(TlsSettings(), str(made / "ca.crt"), ca_field="tls_client_ca")
    assert peer_files(TlsSettings()) is None
    assert serving_files(TlsSettings(tls_ca=str(made / "ca.crt")), None) is None


def reloads(outcome: str) -> float:
    return REGISTRY.get_sample_value("baton_file_reloads_total", {"what": "tls", "outcome": outcome}) or 0.0


def test_changed_files_are_read_again_and_bad_ones_are_not_taken(made: Path, files: dict[str, str]) -> None:
    tls = TlsFiles(*files.values())
    first, version = tls.current(), tls.version
    assert tls.current() is first

    failed, good = reloads("failed"), reloads("ok")
    shutil.copy(made / "two.crt", files["tls_cert"])  # its key has not come yet
    assert tls.current() is first
    assert (tls.version, reloads("failed")) == (version, failed + 1)
    assert tls.current() is first
    assert reloads("failed") == failed + 1, "the same wrong files are told of once"

    shutil.copy(made / "two.key", files["tls_key"])
    assert tls.current().cert == (made / "two.crt").read_bytes()
    assert tls.version != version
    assert reloads("ok") == good + 1

    version = tls.version
    Path(files["tls_ca"]).unlink()
    assert tls.current().cert == (made / "two.crt").read_bytes()
    assert tls.version == version


def test_a_moved_link_is_a_change(made: Path, tmp_path: Path) -> None:
    """How Kubernetes updates a mounted Secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(made / f"{name}.crt", tmp_path / name / "tls.crt")
        shutil.copy(made / f"{name}.key", tmp_path / name / "tls.key")
    (tmp_path / "..data").symlink_to("one")
    for file in ("tls.crt", "tls.key"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    tls = TlsFiles(f"{tmp_path}/tls.crt", f"{tmp_path}/tls.key", None)
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert tls.current().cert == (made / "two.crt").read_bytes()


@pytest.mark.slow
def test_many_peers_connect_at_once(files: dict[str, str]) -> None:
    """If gRPC is given the same certificate anew at each handshake, this crashes four times out of five."""
    command = [sys.executable, "-m", "tests.common.tls_handshakes", *files.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1000"), done.stderr
