"""What clients, other processes and libraries can do to our log."""

from __future__ import annotations

import logging

import pytest

from common.logs import LogFormat, RareLine, setup_logging


def test_headers_that_are_no_text_and_clients_that_leave_print_no_stack(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("router")
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("Invalid encoding on %s", b"\xbe")  # as gRPC does, for each header of a client
    log.error("ExecuteBatchError raised in core by servicer method [/a/b]")
    log.error("something else")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("something else")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_comes_from_others_stays_in_its_line(capsys: pytest.CaptureFixture[str], log_format: LogFormat) -> None:
    setup_logging("router", log_format=log_format)
    reason = "no\n12:00:00.000 ERROR [router] forged\r\x1b[2J\u2028\ud800"
    logging.getLogger("x").info("failed", extra={"reason": reason})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "forged" in line


@pytest.mark.parametrize(
    ("log_format", "expected"),
    [
        ("text", "INFO [router] answered request_id=a reason=None worker=Zürich"),
        (
            "json",
            '"message": "answered", "request_id": "a", "reason": null, "worker": "Z\\u00fcrich"}',
        ),
    ],
)
def test_a_line_tells_all_that_it_was_given(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, expected: str
) -> None:
    setup_logging("router", log_format=log_format)
    facts = {"request_id": "a", "reason": None, "worker": "Zürich"}
    logging.getLogger("x").info("answered", extra=facts)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(expected)


def test_a_rare_line_is_printed_once_a_second_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 100.0
    line = RareLine(logging.getLogger("x"), "refused", lambda: now)
    for now in (100.0, 100.2, 100.9, 101.0, 101.5, 105.0):
        line.happened({"at": now})
    assert [(one.at, one.num_times) for one in caplog.records] == [(100.0, 1), (101.0, 3), (105.0, 2)]  # type: ignore[attr-defined]
