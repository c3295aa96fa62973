"""`--model org/name`: from a cache, from a hub of our own on this machine, and what is said if neither has it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.errors import StartupError
from engine.loading.hub import hub_model, is_hub_name
from tests.engine.tiny_models import advance, make_model, make_runner, random_sequences

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import sys
from common.errors import StartupError
from engine.loading.embedded_model import ensure_model
try:
    print(ensure_model(sys.argv[1], "/nowhere", lambda line: print("report:", line)))
except StartupError as error:
    sys.exit(error.message)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download asks for."""

    folder: Path
    asked: list[str]
    cut: int | None = None  # bytes after which the first answer with weights breaks off
    num_errors: int = 0  # answers with weights, after one that broke off, that are errors

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        type(self).asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in sorted(self.folder.iterdir())
            ]
            self._send(json.dumps(entries).encode(), with_body=with_body)
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self._send(json.dumps(info).encode(), with_body=with_body)
        elif path.startswith("/org/tiny/resolve/") and (file := self.folder / path.rpartition("/")[2]).is_file():
            self._send(file.read_bytes(), with_body=with_body, name=file.name)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, *, with_body: bool, name: str = "") -> None:
        has_weights = with_body and name.endswith(".safetensors")
        if has_weights and type(self).cut is None and type(self).num_errors:
            type(self).num_errors -= 1
            self.send_error(500)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        digest = hashlib.sha256 if name.endswith(".safetensors") else hashlib.sha1
        self.send_header("ETag", f'"{digest(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not with_body:
            return
        if has_weights and type(self).cut is not None:
            body, type(self).cut = body[: self.cut], None
        self.wfile.write(body[start:])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name that it has there)
        pass


@contextmanager
def serving(folder: Path, cut: int | None = None, num_errors: int = 0) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("OneHub", (Hub,), {"folder": folder, "asked": asked, "cut": cut, "num_errors": num_errors})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ensure(model: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, model],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_model_is_downloaded_once_and_found_without_a_hub(tmp_path: Path) -> None:
    source = make_model(tmp_path / "tiny")
    (source / "pytorch_model.bin").write_text("the same weights, in a form that is not read")
    with serving(source) as (endpoint, asked):
        first = ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint)
        assert first.returncode == 0, first.stderr
        assert f"downloading org/tiny from {endpoint}" in first.stdout
        assert not any("pytorch_model.bin" in line and "resolve" in line for line in asked)
        num_asked = len(asked)
        assert ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint).returncode == 0
        assert len(asked) == num_asked  # the cache is enough
    offline = ensure("org/tiny", tmp_path / "home", HF_HUB_OFFLINE="1")
    path = Path(offline.stdout.strip())
    assert (path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    (sequence,) = random_sequences([20])
    advance(make_runner(path), [sequence], [20])


def heavy_model(path: Path) -> Path:
    """With more bytes of weights than huggingface_hub keeps in memory before it writes them (10 MiB)."""
    make_model(path)
    (path / "model.safetensors").write_bytes(random.Random(3).randbytes(25 << 20))
    return path


def starts_of_weights(asked: list[str]) -> list[int]:
    """At which bytes answers with weights were asked to begin."""
    lines = [line for line in asked if line.startswith("GET") and "model.safetensors" in line]
    return [int(re.search(r"bytes=(\d+)-|$", line)[1] or 0) for line in lines]  # type: ignore[index]


@pytest.mark.slow
def test_a_download_that_broke_off_goes_on(tmp_path: Path) -> None:
    """From where it broke off, and a bar says how far it is."""
    source = heavy_model(tmp_path / "tiny")
    with serving(source, cut=12 << 20) as (endpoint, asked):
        result = ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint, TQDM_POSITION="-1")  # as on a terminal
        assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip().splitlines()[-1])
    assert (path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    first, second = starts_of_weights(asked)
    assert first == 0 < second <= 12 << 20
    assert re.search(r"100%\|.*26\.\d+?M", result.stderr)


@pytest.mark.slow
def test_a_later_process_goes_on_with_a_download(tmp_path: Path) -> None:
    source = heavy_model(tmp_path / "tiny")
    with serving(source, cut=12 << 20, num_errors=1) as (endpoint, asked):
        failed = last_line(ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint))
        assert "model org/tiny" in failed
        assert "500" in failed
        result = ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint)
        assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip().splitlines()[-1])
    assert (path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    first, *later = starts_of_weights(asked)
    assert first == 0
    assert 0 < min(later) <= max(later) <= 12 << 20


@pytest.mark.slow
def test_a_damaged_part_of_a_download_is_thrown_away(tmp_path: Path) -> None:
    """It has its length and wrong bytes, as after a power cut."""
    source = heavy_model(tmp_path / "tiny")
    with serving(source, cut=12 << 20, num_errors=1) as (endpoint, asked):
        last_line(ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint))
        (part,) = (tmp_path / "home").rglob("*.part")
        with part.open("r+b") as stream:
            stream.seek(1 << 20)
            stream.write(bytes(1 << 20))
        result = ensure("org/tiny", tmp_path / "home", HF_ENDPOINT=endpoint)
        assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip().splitlines()[-1])
    assert (path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert starts_of_weights(asked)[-1] == 0


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_without_a_hub_it_says_what_to_do(tmp_path: Path) -> None:
    line = last_line(ensure("org/tiny", tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9"))
    assert "model org/tiny: it is not in the cache" in line
    assert "http://127.0.0.1:9 cannot be reached" in line
    assert "give --model its path" in line
    line = last_line(ensure("org/tiny", tmp_path / "home", HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE forbids" in line


def test_a_name_that_the_hub_does_not_know(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "tiny")) as (endpoint, _):
        line = last_line(ensure("org/other", tmp_path / "home", HF_ENDPOINT=endpoint))
    assert "model org/other" in line
    assert endpoint in line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("a/b/c", False),
        ("/a/b", False),
        ("../a", False),
        ("name", False),
        ("a/b--c", False),
        ("a/b.git", False),
    ],
)
def test_what_is_a_name_on_a_hub(name: str, expected: bool) -> None:
    assert is_hub_name(name) is expected


def test_a_half_of_a_model_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="a part of it"):
        hub_model("org/tiny", print)
