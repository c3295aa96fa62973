"""The screen of `baton top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from baton.client.report import FleetWorker
from baton.timeline import render_stages
from baton.top.figures import REQUEST_COLUMNS, WORKER_COLUMNS, ended_at, matches, request_row, summary, worker_row
from common.errors import BatonError
from common.finished_request import FinishedRequest

NUM_SAMPLES = 120
MAX_ROWS = 200  # requests that are shown


@dataclass(slots=True, frozen=True)
class Seen:
    """What a router told at one time."""

    workers: Sequence[FleetWorker]
    requests: Sequence[FinishedRequest]  # the newest first


Look = Callable[[], Awaitable[Seen]]
"""Asks the router. Raises `BatonError`."""


class TimelineScreen(ModalScreen[None]):
    """One request's timeline."""

    BINDINGS: ClassVar = [Binding("escape,q,enter", "app.pop_screen", "close")]
    CSS = """
    TimelineScreen { align: center middle; }
    TimelineScreen > VerticalScroll {
        width: 90%; height: auto; max-height: 80%; border: round $primary; padding: 1; background: $surface;
    }
    """

    def __init__(self, request: FinishedRequest) -> None:
        super().__init__()
        self._request = request

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            width = max(40, int(self.app.size.width * 0.9) - 6)
            yield Static(render_stages(self._request, width=width), id="timeline", markup=False)


class Top(App[None]):
    TITLE = "baton top"
    CSS = """
    #summary { height: auto; padding: 0 1; text-style: bold; }
    #problem { height: auto; padding: 0 1; color: $error; }
    Sparkline { height: 2; margin: 0 1; }
    .title { padding: 0 1; color: $text-muted; }
    #workers { height: auto; max-height: 40%; }
    #requests { height: 1fr; }
    #filter { display: none; }
    #filter.shown { display: block; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("slash", "filter", "filter requests"),
        Binding("escape", "clear_filter", "clear", show=False),
    ]

    def __init__(self, look: Look, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._look = look
        self._interval_s = interval_s
        self._clock = clock
        self._newest = (0.0, 0.0)  # when the last request ended by the router's clock, and was first seen by ours
        self._is_paused = False
        self._is_looking = False
        self._seen = Seen((), ())
        self._shown: list[FinishedRequest] = []
        self._words = ""
        self._tokens: deque[float] = deque([0.0], maxlen=NUM_SAMPLES)

    def compose(self) -> ComposeResult:
        yield Static("connecting", id="summary", markup=False)
        yield Static("", id="problem", markup=False)
        yield Static("tokens/s of answers that ended", classes="title")
        yield Sparkline([0.0], id="tokens")
        yield DataTable(id="workers", cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="id, client, worker, reason", id="filter")
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        self._worker_table.add_columns(*WORKER_COLUMNS)
        self._request_table.add_columns(*REQUEST_COLUMNS)
        self._request_table.focus()
        self.set_interval(self._interval_s, self.refresh_figures)
        self.run_worker(self.refresh_figures(), exclusive=False)

    @property
    def _worker_table(self) -> DataTable[Text]:
        return self.query_one("#workers", DataTable)

    @property
    def _request_table(self) -> DataTable[Text]:
        return self.query_one("#requests", DataTable)

    async def refresh_figures(self) -> None:
        """Asks the router and shows what it says; what it said before stays if it does not answer."""
        if self._is_paused or self._is_looking:
            return
        self._is_looking = True
        try:
            self._seen = await self._look()
            problem = ""
        except BatonError as error:
            problem = f"no news: {error.message}"
        finally:
            self._is_looking = False
        self.query_one("#problem", Static).update(problem)
        if not problem:
            self._show()

    def _show(self) -> None:
        told = summary(self._seen.workers, self._seen.requests, self._router_time())
        self.query_one("#summary", Static).update(told.in_words())
        self._tokens.append(told.tokens_per_s)
        self.query_one("#tokens", Sparkline).data = list(self._tokens)
        _fill(self._worker_table, [(one.address, worker_row(one)) for one in self._seen.workers])
        self._show_requests()

    def _router_time(self) -> float:
        """The router's time of day, as far as its requests tell it: this terminal's may be another."""
        now, newest = self._clock(), max(map(ended_at, self._seen.requests), default=0.0)
        if newest != self._newest[0]:
            self._newest = (newest, now)
        return newest + now - self._newest[1]

    def _show_requests(self) -> None:
        found = [one for one in self._seen.requests if matches(one, self._words)]
        self._shown = found[:MAX_ROWS]
        rows = [
            (f"{one.request_id} {one.time}", request_row(one, time.strftime("%H:%M:%S", time.localtime(one.time))))
            for one in self._shown
        ]
        _fill(self._request_table, rows)

    # -------------------------------------------------------------------------------------------- keys

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self.query_one("#problem", Static).update("paused" if self._is_paused else "")

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_clear_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self._request_table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._show_requests()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self._request_table.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "requests" and event.cursor_row < len(self._shown):
            self.push_screen(TimelineScreen(self._shown[event.cursor_row]))


def _fill(table: DataTable[Text], rows: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    """Shows `rows`, each with its key. The cursor stays on its row, and the view where it is."""
    at, top = table.cursor_row, table.scroll_y
    key = table.ordered_rows[at].key.value if 0 <= at < table.row_count else None
    table.clear()
    for number, (row_key, row) in enumerate(rows):
        # As `Text`: in a str, the brackets of an IPv6 address are markup.
        table.add_row(*map(Text, row), key=f"{row_key} {number}" if row_key in table.rows else row_key)
        if row_key == key:
            at = number
    if table.row_count:
        table.move_cursor(row=min(at, table.row_count - 1), scroll=False)
        table.scroll_to(y=top, animate=False)
