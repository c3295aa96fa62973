"""The live page: its files, who may see what it shows, and the events that tell it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from common.config import RouterSettings
from common.errors import OverloadedError, UnavailableError
from common.types import WorkerRole
from protos.baton.v1 import worker_pb2
from router.api.ui.live import MAX_VIEWERS, Live
from router.api.ui.pages import FOLDER, KINDS
from router.api.worker_views import WorkerViews
from router.fleet.registry import Registry
from router.limits.quotas import Quotas
from router.make_gateway import make_gateway
from router.processes.process_query import ProcessQuery, T
from router.processes.router_process import RouterProcess
from router.running.threads import TextThreads
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.support.fake_worker import FakeWorker

MAX_PAGE_BYTES = 150_000
FILES = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in KINDS}
AS_HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = {"operator": "o" * 32, "tenant": "t" * 32}
Told = dict[str, Any]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(f"{KEYS['operator']} operator=true\n{KEYS['tenant']} tenant=a\n")
    return str(tmp_path / "keys")


def client_of(router: RunningRouter, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {KEYS[key]}"}
    return httpx.AsyncClient(base_url=router.url, headers=headers, timeout=30)


@asynccontextmanager
async def watching(router: RunningRouter, key: str | None = None) -> AsyncIterator[AsyncIterator[tuple[str, Told]]]:
    async with client_of(router, key) as client, client.stream("GET", "/ui/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events_of(answer)


class Hung(RouterProcess):
    """One of several, of which another does not answer."""

    is_hung = True

    async def ask(self, query: ProcessQuery[T], limit: int = 0, tenant: str | None = None, which: str = "") -> list[T]:
        if self.is_hung:
            raise UnavailableError("process 2 does not answer")
        return await super().ask(query, limit, tenant, which)


def live_page(worker: FakeWorker, process: RouterProcess | None = None, **given: Any) -> Live:
    settings = RouterSettings(decode=(worker.address,), **given)
    process, registry = process or RouterProcess(settings), Registry([], [worker.address])
    gateway = make_gateway(settings, registry, process, Quotas(None), TextThreads(), TextThreads(1))
    return Live(gateway, registry, WorkerViews(registry, process))


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, Told]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


class Page:
    """What a page knows after the events that it has read."""

    def __init__(self, events: AsyncIterator[tuple[str, Told]]) -> None:
        self._events = events
        self.names: list[str] = []
        self.workers: dict[str, Told] = {}
        self.samples: list[Told] = []
        self.handoffs: list[list[object]] = []
        self.running: list[Told] = []
        self.about: Told = {}
        self._columns: dict[str, list[str]] = {}

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not done():
                await self._read()

    async def _read(self) -> None:
        name, told = await anext(self._events)
        self.names.append(name)
        if name == "full":
            self.workers, self.samples, self._columns = {}, [], told["columns"]
        for row in told["workers"]:
            self.workers[row[0]] = dict(zip(self._columns["workers"], row, strict=True))
        for address in told.get("gone", ()):
            del self.workers[address]
        self.samples += [dict(zip(self._columns["samples"], row, strict=True)) for row in told["samples"]]
        self.about = told.get("about", self.about)
        self.handoffs, self.running = told["handoffs"], told["running"]


# ------------------------------------------------------------------------------------------------- the files


def test_the_page_is_small_and_asks_nobody_else() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < MAX_PAGE_BYTES
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    page = FILES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)  # the security policy forbids them
    named = set(re.findall(r"(?:src|href)=\"([\w.]+)\"", page))
    for text in FILES.values():
        named |= set(re.findall(r"from \"\./([\w.]+)\"", text))
    assert named <= set(FILES)
    assert set(FILES) - named == {"index.html"}, "a file that nothing asks for"


async def test_the_files_need_no_key(worker: FakeWorker, start_router: StartRouter, keys: str) -> None:
    router = await start_router(worker, api_keys_file=keys)
    async with client_of(router) as client:
        page = await client.get("/ui/")
        assert (page.status_code, page.text) == (200, FILES["index.html"])
        for name in set(FILES) - {"index.html"}:
            answer = await client.get(f"/ui/{name}")
            assert (answer.status_code, answer.text) == (200, FILES[name])
            assert answer.headers["content-type"] == KINDS[Path(name).suffix]
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert page.headers["x-content-type-options"] == "nosniff"
        same = await client.get("/ui/", headers={"If-None-Match": page.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        head = await client.head("/ui/")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])
        for path in ("/ui/nothing.js", "/ui/../server.py", "/ui/%2e%2e/pages.py", "/ui/pages.py"):
            assert (await client.get(path)).status_code == 401


async def test_browsers_are_led_to_it(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, root_path="/llm")
    async with client_of(router) as client:
        for path in ("/", "/llm/", "/llm", "/ui", "/llm/ui"):
            answer = await client.get(path, headers=BROWSER)
            assert (answer.status_code, answer.headers["location"]) == (307, "/llm/ui/"), path
        assert (await client.get("/llm/ui/")).text == FILES["index.html"]
        program = await client.get("/")
        assert (program.status_code, program.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_without_the_page(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, ui=False)
    async with client_of(router) as client:
        for path in ("/", "/ui", "/ui/", "/ui/app.js", "/ui/events"):
            assert (await client.get(path, headers=BROWSER)).status_code == 404, path


# -------------------------------------------------------------------------------------------------- events


async def test_the_fleet_as_it_is_and_as_it_changes(start_worker: StartWorker, start_router: StartRouter) -> None:
    prefill, decode, other = [
        await start_worker(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
    ]
    router = await start_router(decode, other, prefill=(prefill,))
    async with watching(router) as events, client_of(router) as client:
        page = Page(events)
        await page.until(lambda: page.names)
        assert page.names == ["full"]
        assert {one["role"] for one in page.workers.values()} == {"prefill", "decode"}
        assert page.workers.keys() == {prefill.address, decode.address, other.address}
        told = page.workers[decode.address]
        assert (told["state"], told["breaker"], told["blocks"], told["running"]) == ("ready", "closed", 100, 0)
        assert (page.about["model"], page.about["processes"], page.about["not_ready"]) == ("tiny", 1, "")

        decode.change(num_requests_waiting=7, state=worker_pb2.WORKER_STATE_DRAINING)
        await page.until(lambda: page.workers[decode.address]["state"] == "draining")
        assert page.workers[decode.address]["waiting"] == 7

        body = {"prompt": "The capital of France is a city. " * 3, "max_tokens": 4}
        other.hang_after = 0  # until the page has shown the handoff
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        await page.until(lambda: page.handoffs)
        assert page.handoffs == [[prefill.address, other.address, 1]]
        other.hang_after = None
        assert (await answer).status_code == 200
        await page.until(lambda: page.samples and page.samples[-1]["output_tokens"] == 4)
        assert page.samples[-1]["requests"] == 1
        assert page.samples[-1]["prompt_tokens"] > 16
        await page.until(lambda: not page.handoffs)  # it is over
        assert set(page.names[1:]) == {"change"}


async def test_a_request_while_it_runs_and_how_fast_answers_come(worker: FakeWorker, router: RunningRouter) -> None:
    async with watching(router) as events, client_of(router) as client:
        page = Page(events)
        worker.hang_after = 2
        body = {"prompt": "Hello", "max_tokens": 4, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "one"}) as answer:
            assert answer.status_code == 200
            await page.until(lambda: page.running and page.running[0]["output_tokens"] == 2)
            (told,) = page.running
            assert (told["request_id"], told["phase"], told["decode_worker"]) == ("one", "decode", worker.address)
            assert 0 < told["ttft_ms"] <= told["total_ms"]
        await page.until(lambda: not page.running)  # its client left
        assert page.samples[-1]["ttft_p50_ms"] is None
        worker.hang_after = None
        assert (await client.post("/v1/completions", json={**body, "stream": False})).status_code == 200
        await page.until(lambda: page.samples[-1]["ttft_p50_ms"] is not None)
        last = page.samples[-1]
        assert 0 < last["ttft_p50_ms"] <= last["ttft_p95_ms"]
        assert 0 <= last["tpot_p50_ms"] <= last["tpot_p95_ms"]


async def test_who_may_watch(worker: FakeWorker, start_router: StartRouter, keys: str) -> None:
    router = await start_router(worker, api_keys_file=keys)
    async with client_of(router) as nobody, client_of(router, "tenant") as tenant:
        assert (await nobody.get("/ui/events")).status_code == 401
        refused = await tenant.get("/ui/events")
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert "operator" in refused.json()["error"]["message"]
    async with watching(router, "operator") as events:
        assert (await anext(events))[0] == "full"


async def test_all_viewers_see_the_same_look(router: RunningRouter) -> None:
    async with watching(router) as first, watching(router) as second:
        pages = Page(first), Page(second)
        for page in pages:
            await page.until(lambda page=page: len(page.samples) > 2 and page.workers)  # type: ignore[misc]
    times = [{sample["time"] for sample in page.samples} for page in pages]
    assert times[0] & times[1]


async def test_a_viewer_that_missed_a_change_gets_all_again(worker: FakeWorker) -> None:
    live = live_page(worker)
    parts = live.parts()
    assert (await anext(parts)).startswith(b":")
    first = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    await live.look()
    assert (await first).startswith(b"event: full\n")
    await live.look()
    assert (await anext(parts)).startswith(b"event: change\n")
    await live.look()
    await live.look()  # it still reads the one before
    assert (await anext(parts)).startswith(b"event: full\n")
    await parts.aclose()


async def test_viewers_hear_of_looks_that_fail(worker: FakeWorker) -> None:
    process = Hung(RouterSettings(decode=(worker.address,)))
    live = live_page(worker, process)
    parts, looks = live.parts(), asyncio.create_task(live.run())
    try:
        async with asyncio.timeout(20):
            assert (await anext(parts)).startswith(b":")
            missed = await anext(parts)
            assert missed == b'event: missed\ndata: {"reason":"the router\'s processes do not answer"}\n\n'
            process.is_hung = False
            while (part := await anext(parts)) == missed:
                pass
        assert part.startswith(b"event: full\n")
        await parts.aclose()
    finally:
        looks.cancel()


async def test_a_viewer_of_looks_that_never_end_is_sent_away(worker: FakeWorker) -> None:
    live = live_page(worker, request_timeout=0.05, receive_timeout=0.05)
    async with asyncio.timeout(20):
        assert [part async for part in live.parts()] == [b": baton\n\n"]


async def test_too_many_viewers_are_refused(worker: FakeWorker) -> None:
    live = live_page(worker)
    request = Request({"type": "http"})
    answers = [await live.events(request) for _ in range(MAX_VIEWERS)]
    with pytest.raises(OverloadedError, match="watch this router already"):
        await live.events(request)
    await answers[0]._parts.aclose()  # type: ignore[attr-defined]
    assert (await live.events(request)).status_code == 200


async def test_a_router_ends_although_it_is_watched(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker)
    async with watching(router) as events:
        assert (await anext(events))[0] == "full"
        router.stop.set()
        async with asyncio.timeout(20):
            await router.task
