"""How far loading is."""

from __future__ import annotations

import io
import itertools

import pytest

from engine.loading.progress import with_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar() -> None:
    terminal = Terminal()
    assert list(with_progress("abc", "quantising to int8", terminal)) == ["a", "b", "c"]
    shown = terminal.getvalue().split("\r")
    assert shown[1] == f"quantising to int8 [{'#' * 10}{' ' * 20}] 1/3"
    assert shown[-1] == f"quantising to int8 [{'#' * 30}] 3/3\n"


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seconds = itertools.count(0, 3)
    assert list(with_progress(range(8), "quantising", io.StringIO(), lambda: next(seconds))) == list(range(8))
    done = [vars(record)["done"] for record in caplog.records]
    assert done[-1] == 8
    assert 2 <= len(done) < 8
