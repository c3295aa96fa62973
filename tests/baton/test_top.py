"""`baton top`: what it shows of what a router tells, by textual's own pilot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.client.report import FleetWorker
from baton.top.figures import MAX_REQUESTS, bar, request_row, summary, worker_row
from common.errors import UnavailableError
from common.finished_request import FinishedRequest, Stage
from common.types import WorkerRole, WorkerState

NOW = 1_700_000_000.0
WORKER = FleetWorker(
    role=WorkerRole.DECODE,
    address="d:1",
    epoch="e",
    state=WorkerState.READY,
    num_requests_running=3,
    num_requests_waiting=1,
    num_blocks=100,
    num_free_blocks=30,
    num_cached_blocks=20,
    num_leases=0,
    integrity="ok",
    breaker="closed",
)
PREFILL = replace(WORKER, role=WorkerRole.PREFILL, address="p:1", state=WorkerState.DRAINING)
REQUEST = FinishedRequest(
    request_id="one",
    time=NOW - 3,
    status="ok",
    finish_reason="stop",
    operation="chat",
    model="m",
    prompt_tokens=50,
    output_tokens=11,
    ttft_ms=100.0,
    total_ms=1100.0,
    prefill_worker="p:1",
    decode_worker="d:1",
    stages=(Stage(name="prefill", where="p:1", start_ms=0, end_ms=90), Stage(name="decode", where="d:1", end_ms=1100)),
)
FAILED = replace(REQUEST, request_id="two", status="unavailable", finish_reason="", reason="gone", ttft_ms=None)


def test_the_line_at_the_top() -> None:
    old, left = replace(REQUEST, time=NOW - 60), replace(REQUEST, status="cancelled", ttft_ms=None, output_tokens=0)
    told = summary([WORKER, PREFILL], [REQUEST, FAILED, left, old], NOW)
    assert (told.num_ready, told.num_workers, told.num_running, told.num_waiting) == (1, 2, 3, 2)
    assert (told.requests_per_s, told.tokens_per_s, told.num_failed) == (0.3, 2.2, 1)
    assert (told.ttft_ms, told.tpot_ms) == ((100.0, 100.0), (100.0, 100.0))
    assert summary([], [], NOW).in_words().startswith("0 of 0 workers ready")


def test_rates_of_more_requests_than_the_router_keeps() -> None:
    requests = [replace(REQUEST, time=NOW - 2 - number / MAX_REQUESTS) for number in range(MAX_REQUESTS)]
    assert summary([], requests, NOW).requests_per_s == pytest.approx(MAX_REQUESTS / 1.9, rel=0.01)


def test_rows() -> None:
    assert worker_row(WORKER)[:8] == ("decode", "d:1", "ready", "3", "1", "0", "50%", "█████     ")
    assert request_row(FAILED, "10:00:00")[1:9] == ("two", "", "unavailable", "50", "0", "11", "-", "-")
    assert (bar(0.0, 4), bar(2.0, 4), bar(0.5, 3)) == ("    ", "████", "█▌ ")


class Router:
    def __init__(self) -> None:
        self.requests = [REQUEST, FAILED]
        self.workers = [WORKER, PREFILL]
        self.error: UnavailableError | None = None

    async def look(self) -> object:
        from baton.top.screen import Seen

        if self.error is not None:
            raise self.error
        return Seen(list(self.workers), list(self.requests))


async def test_the_screen() -> None:
    pytest.importorskip("textual", reason="textual is not installed: `make install`")
    from rich.text import Text
    from textual.widgets import DataTable, Input, Static

    from baton.top.screen import TimelineScreen, Top

    router = Router()
    now = 5.0  # by this terminal's clock, which is not the router's
    app = Top(router.look, interval_s=3600, clock=lambda: now)  # type: ignore[arg-type]
    async with app.run_test(size=(160, 40)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()

        def text(name: str) -> str:
            return str(app.query_one(f"#{name}", Static).render())

        def shown(name: str) -> list[list[str]]:
            table: DataTable[Text] = app.query_one(f"#{name}", DataTable)
            return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]

        assert text("summary").startswith(
            "1 of 2 workers ready · 3 running, 2 waiting · 0.2 requests/s, 1 failed, 2 tokens/s"
        )
        now += 11
        await app.refresh_figures()
        assert "0.0 requests/s, 0 tokens/s" in text("summary")
        assert [row[1] for row in shown("workers")] == ["d:1", "p:1"]
        assert [row[1] for row in shown("requests")] == ["one", "two"]

        router.requests.insert(0, replace(REQUEST, request_id="three"))  # the cursor stays on its request
        await app.refresh_figures()
        await pilot.press("enter")
        assert isinstance(app.screen, TimelineScreen)
        said = str(app.screen.query_one("#timeline", Static).render())
        assert said.startswith("one: chat m")
        assert "prefill" in said
        await pilot.press("escape")

        await pilot.press("slash", *"two")
        assert [row[1] for row in shown("requests")] == ["two"]
        await pilot.press("enter", "escape")
        assert (app.query_one("#filter", Input).value, len(shown("requests"))) == ("", 3)

        router.workers[1] = replace(PREFILL, address="[fd00::a]:50063")  # in a str this would be markup
        await app.refresh_figures()
        await pilot.pause()  # until the column is as wide
        drawn = "".join(segment.text for segment in app.query_one("#workers").render_line(2))
        assert " [fd00::a]:50063 " in drawn

        router.error = UnavailableError("nobody answers")
        await app.refresh_figures()
        assert text("problem") == "no news: nobody answers"
        assert len(shown("workers")) == 2
        router.error = None
        router.workers.pop()
        await pilot.press("p")
        await app.refresh_figures()
        assert (text("problem"), len(shown("workers"))) == ("paused", 2)
        await pilot.press("p")
        await app.refresh_figures()
        assert (text("problem"), len(shown("workers"))) == ("", 1)
