"""How far loading is."""

from __future__ import annotations

import io
import itertools

import pytest

from engine.loading.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_the_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    terminal = Terminal()
    with Progress("quantising to int8", 3, "", stream=terminal, log_interval_s=0) as progress:
        for _ in range(3):
            progress.add()
    assert "quantising to int8" in terminal.getvalue()
    assert "/3.00" in terminal.getvalue()
    assert not caplog.records


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seconds, stream = itertools.count(0, 3), io.StringIO()
    with Progress("quantising", 8, "", stream=stream, clock=lambda: next(seconds), log_interval_s=5) as progress:
        for _ in range(8):
            progress.add()
    assert [vars(record)["percent"] for record in caplog.records] == [25, 50, 75, 100]
    assert not stream.getvalue()
