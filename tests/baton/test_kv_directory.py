from __future__ import annotations

import functools
from pathlib import Path

import pytest

from baton.stack import kv_directory
from common.errors import StartupError


def test_given_kv_directory_is_made_and_kept(tmp_path: Path) -> None:
    given = tmp_path / "a" / "b"
    with kv_directory.kv_directory(str(given)) as path:
        assert path == given
        assert given.is_dir()
    assert given.is_dir()


def test_kv_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="Not a directory"), kv_directory.kv_directory(str(tmp_path / "file" / "kv")):
        pass


def test_private_kv_directory_goes_away_and_so_does_an_abandoned_one(tmp_path: Path) -> None:
    private = functools.partial(kv_directory.kv_directory, None, memory=tmp_path, min_free=0, abandoned_after_s=0.0)
    abandoned = tmp_path / "baton-kv-of-a-killed-stack"
    abandoned.mkdir()
    with private() as mine:
        assert mine.parent == tmp_path
        assert not abandoned.exists()
        with private() as other:
            assert mine.is_dir()  # in use: it is not taken for abandoned
            assert other != mine
    assert list(tmp_path.iterdir()) == []
