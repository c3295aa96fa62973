"""The picture of one request's time, exactly as it is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.cli.ask import print_requests
from baton.client.report import RequestReport, Timings, Usage
from baton.timeline import render_timeline
from common.finished_request import FinishedRequest
from common.types import FinishReason

REPORT = RequestReport(
    timings=Timings(
        queue_ms=0.4,
        prefill_ms=41.2,
        handoff_ms=3.1,
        transfer_ms=2.2,
        first_decode_ms=22.0,
        ttft_ms=42.1,
        total_ms=246.7,
        tokens_per_second=41.2,
    ),
    prefill_worker="127.0.0.1:50061",
    decode_worker="127.0.0.1:50062",
    num_blocks_moved=3,
    num_bytes_moved=1_105_920,
)
USAGE = Usage(prompt_tokens=40, completion_tokens=9, cached_tokens=16)

GOLDEN = """\
  queue             0.4 ms  ▏
  prefill          41.2 ms  ████████▊
  handoff           3.1 ms          █▍
  first decode     22.0 ms           █████
  decode          180.0 ms                ██████████████████████████████████████
  total           246.7 ms  first token after 42.1 ms, 41.2 tokens/s
  40 prompt tokens (16 cached) → 9 tokens, ended by stop
  prefill on 127.0.0.1:50061 → decode on 127.0.0.1:50062
  3 KV blocks moved, 1.1 MB; 2.2 ms of the handoff
"""

GOLDEN_ASCII = """\
  queue             12.0 s  ###############################
  prefill         500.0 ms                                ##
  handoff           0.0 ms
  first decode     20.0 ms                                 #
  decode            0.0 ms
  total             12.5 s  first token after 12.5 s
  5 prompt tokens -> 2 tokens
  prefill and decode on 127.0.0.1:50062
  computed in place: prefill worker 127.0.0.1:50061 went
    away
  retries: 1
"""


def test_picture() -> None:
    assert render_timeline(REPORT, USAGE, FinishReason.STOP) == GOLDEN.rstrip("\n")


def test_drafts_are_told() -> None:
    report = replace(REPORT, num_drafted_tokens=30, num_accepted_tokens=21)
    assert render_timeline(report, USAGE).splitlines()[-1] == "  21 of 30 drafted tokens were right"


def test_what_was_lent_is_told() -> None:
    report = replace(REPORT, num_blocks_lent=15)
    assert render_timeline(report, USAGE).splitlines()[-1] == "  15 KV blocks lent to the prefill worker"


def test_picture_of_a_fallback_in_plain_ascii() -> None:
    report = RequestReport(
        timings=Timings(queue_ms=12_000, prefill_ms=500, first_decode_ms=20, ttft_ms=12_500, total_ms=12_520),
        decode_worker="127.0.0.1:50062",
        fallback_reason="prefill worker 127.0.0.1:50061 went away",
        num_retries=1,
    )
    picture = render_timeline(report, Usage(prompt_tokens=5, completion_tokens=2), width=60, ascii_only=True)
    assert picture.isascii()
    assert picture == GOLDEN_ASCII.rstrip("\n")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_fits_its_width(width: int) -> None:
    report = RequestReport(timings=REPORT.timings, decode_worker="worker." * 30, fallback_reason="because " * 30)
    assert max(map(len, render_timeline(report, USAGE, width=width).splitlines())) <= width


def test_nothing_measured_draws_no_bar() -> None:
    assert "█" not in render_timeline(RequestReport(), Usage())


def test_every_part_that_took_time_is_seen() -> None:
    timings = Timings(queue_ms=0.001, prefill_ms=1000, handoff_ms=0.001, first_decode_ms=0.001, total_ms=1000.003)
    lines = render_timeline(RequestReport(timings=timings), Usage()).splitlines()
    assert all(len(line) > 28 for line in lines[:4])


def test_the_table_of_requests_says_which_targets_were_missed(capsys: pytest.CaptureFixture[str]) -> None:
    plain, good = FinishedRequest(request_id="plain"), FinishedRequest(request_id="good", ttft_met=True)
    print_requests([plain])
    assert "targets" not in capsys.readouterr().out
    late, slow = (FinishedRequest(request_id="x", ttft_met=is_met, tpot_met=False) for is_met in (False, True))
    print_requests([plain, good, late, slow])
    head, *rows = capsys.readouterr().out.splitlines()
    at = head.index("targets")
    assert [row[at:].strip() for row in rows] == ["", "met", "missed ttft, tpot", "missed tpot"]
