"""What others' libraries say in our log."""

from __future__ import annotations

import logging

import pytest

from common.logs import setup_logging


def test_headers_that_are_no_text_leave_no_stack(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("router")
        log = logging.getLogger("grpc._cython.cygrpc")
        log.error("Invalid encoding on %s", b"\xbe")  # as gRPC does, for each header of a client
        log.error("something else")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("something else")
