"""Files and batches over REST, by the official client, on a fake worker; and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from common.config import RouterSettings
from common.errors import StartupError
from protos.baton.v1 import demand_pb2, demand_pb2_grpc
from router.batches.lines import read_lines, split
from router.batches.records import Batch, BatchLine, BatchStatus, LineAnswer, LineError
from router.batches.runner import BatchRunner, new_batch_id, new_file_id
from router.batches.store import BatchStore
from router.limits.clients import NOBODY, ApiClient
from router.server import serve
from tests.each_case import each_case
from tests.router.conftest import SETTINGS, RunningRouter, StartRouter, sample
from tests.support.fake_worker import ANSWER, FakeWorker

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
HOUR: Any = "1h"  # which the client's types do not know
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Hi {custom_id}"}], "max_tokens": 100}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture
async def router(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> RunningRouter:
    return await start_router(worker, batch_file=str(tmp_path / "batches.db"), batch_max_file_mb=4.0)


async def uploaded(router: RunningRouter, data: bytes, name: str = "in.jsonl") -> str:
    return (await router.openai.files.create(file=(name, data), purpose="batch")).id


async def ended(router: RunningRouter, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await router.openai.batches.retrieve(batch_id)).status not in ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return batch


async def run(router: RunningRouter, data: bytes, **settings: Any) -> Any:
    given: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **settings}
    batch = await router.openai.batches.create(input_file_id=await uploaded(router, data), **given)
    return await ended(router, batch.id)


async def content(router: RunningRouter, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in (await router.openai.files.content(file_id)).text.splitlines()]


async def test_a_batch_by_the_official_client(router: RunningRouter, worker: FakeWorker) -> None:
    wrong = line("wrong")
    wrong["body"]["temperature"] = -1
    batch = await run(router, jsonl(line("a"), wrong, line("b")), metadata={"team": "x"})
    assert (batch.status, batch.metadata) == ("completed", {"team": "x"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= batch.expires_at
    answers = await content(router, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == ["a", "b"]
    for one in answers:
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
        assert one["response"]["body"]["id"].endswith(one["response"]["request_id"])
    [refused] = await content(router, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("wrong", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert {request.priority for request in worker.requests} == {0}
    assert [one.id async for one in router.openai.batches.list()] == [batch.id]


async def test_files(router: RunningRouter) -> None:
    files = router.openai.files
    data = jsonl(*(line(str(number)) for number in range(20_000)))  # of several parts
    first, second = await uploaded(router, data, "one.jsonl"), await uploaded(router, b"{}", "two.jsonl")
    told = await files.retrieve(first)
    assert (told.bytes, told.filename, told.purpose, told.status) == (len(data), "one.jsonl", "batch", "processed")
    assert (await files.content(first)).content == data
    assert [one.id async for one in files.list(limit=1)] == [second, first]
    assert (await files.delete(first)).deleted
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(first)


@each_case(
    ("broken", "line_number", "param"),
    [
        (b"{", 1, None),
        (b"[]", 1, None),
        (jsonl(line("a")) + b"\xff\n", 2, None),
        (jsonl(line("a"), line("a")), 2, "custom_id"),
        (jsonl(line("")), 1, "custom_id"),
        (jsonl(line("a", method="GET")), 1, "method"),
        (jsonl(line("a", url="/v1/embeddings")), 1, "url"),
        (jsonl(line("a", body={"stream": True})), 1, "body.stream"),
        (jsonl(line("a", body={"priority": 3})), 1, "body.priority"),
        (b"\n \n", None, None),
    ],
)
async def test_a_file_that_is_not_one_of_requests(
    router: RunningRouter, broken: bytes, line_number: int | None, param: str | None
) -> None:
    batch = await run(router, broken)
    assert batch.status == "failed"
    [error] = batch.errors.data
    assert (error.line, error.param) == (line_number, param)
    assert batch.request_counts.total == 0


async def test_cancelling_ends_requests_and_tells_which_were_not_made(
    router: RunningRouter, worker: FakeWorker
) -> None:
    worker.delay_s = 0.5
    file_id = await uploaded(router, jsonl(*(line(str(number)) for number in range(9))))
    batch = await router.openai.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    async with asyncio.timeout(20):
        while not worker.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(openai.BadRequestError, match="file_id"):
        await router.openai.files.delete(file_id)
    assert (await router.openai.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(router, batch.id)
    assert batch.status == "cancelled"
    missing = await content(router, batch.error_file_id)
    assert len(missing) == 9
    assert {one["error"]["code"] for one in missing} == {"batch_cancelled"}
    await asyncio.wait_for(worker.cancelled.wait(), 20)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await router.openai.batches.cancel(batch.id)


@each_case(
    ("changes", "field"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "1000h"}, "completion_window"),
        ({"metadata": {"x": 600 * "y"}}, "metadata.x"),
        ({"other": 1}, "other"),
    ],
)
async def test_refused_batches(router: RunningRouter, changes: dict[str, Any], field: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", **changes}
    async with httpx.AsyncClient(base_url=router.url, verify=False) as client:
        answer = await client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@each_case(
    ("sent", "status", "field"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400, "other"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
        ({"data": {"purpose": "batch", "x": "1"}, "files": {"file": b"x"}}, 400, "x"),
        ({"files": {"file": b"x"}}, 400, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, 400, "file"),
        ({"json": {"purpose": "batch"}}, 415, None),
        ({"content": b"", "headers": {"content-type": f"multipart/form-data; boundary={300 * 'x'}"}}, 415, None),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x"}, "headers": {"origin": "https://a"}}, 415, None),
        ({"data": {"purpose": "batch"}, "files": {"file": bytes(4 * 2**20 + 1)}}, 413, None),
    ],
)
async def test_refused_uploads(router: RunningRouter, sent: Any, status: int, field: str | None) -> None:
    async with httpx.AsyncClient(base_url=router.url, verify=False) as client:
        answer = await client.post("/v1/files", **sent)
        listed = await client.get("/v1/files")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
    assert listed.json()["data"] == []


async def test_tenants_see_their_own(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "sk-alice name=alice tenant=research\nsk-bob name=bob tenant=research\nsk-eve name=eve tenant=sales\n"
    )
    router = await start_router(worker, batch_file=str(tmp_path / "batches.db"), api_keys_file=str(keys))
    alice, bob, eve = (router.openai.with_options(api_key=f"sk-{name}") for name in ("alice", "bob", "eve"))
    file = await alice.files.create(file=("a.jsonl", jsonl(line("a"))), purpose="batch")
    batch = await bob.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=HOUR)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await eve.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=HOUR)
    for call in (eve.batches.retrieve(batch.id), eve.batches.cancel(batch.id), eve.files.content(file.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    assert [one async for one in eve.files.list()] == []
    async with asyncio.timeout(20):
        while (batch := await alice.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
def long_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine half a second may pass between two requests of one client."""
    monkeypatch.setattr("router.make_batches.QUIET_S", 3.0)


@pytest.mark.usefixtures("long_quiet")
async def test_a_line_makes_way_and_goes_on_where_it_stopped(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after, worker.hangs_for_good = 2, True
    pauses = sample("baton_router_batch_pauses_total")
    batch = asyncio.create_task(run(router, jsonl(line("a"))))
    await asyncio.wait_for(worker.asked.wait(), 20)
    watching = demand_pb2_grpc.DemandServiceStub(router.channel).WatchDemand(demand_pb2.WatchDemandRequest())
    async for demand in watching:
        if demand.num_output_tokens_total == 2:
            break
    watching.cancel()
    [first] = worker.requests
    worker.hang_after = None
    for _ in range(3):  # one after the other: no line comes between them
        answer = await router.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Now"}], max_tokens=100
        )
        assert answer.choices[0].message.content == ANSWER
    await asyncio.wait_for(worker.cancelled.wait(), 20)
    ended_batch = await batch
    [told] = await content(router, ended_batch.output_file_id)
    assert told["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    *others, again = worker.requests[1:]
    assert len(others) == 3
    assert again.request_id == first.request_id
    assert list(again.output_token_ids) == worker.answer[: len(again.output_token_ids)]
    assert len(again.output_token_ids) == 2
    assert sample("baton_router_batch_pauses_total") == pauses + 1


async def test_a_paused_line_takes_none_of_its_clients_places(
    worker: FakeWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.yaml"
    keys.write_text("sk-ann name=ann tenant=lab\n")
    limits.write_text("keys: {ann: {streams: 1}}\ntenants: {lab: {streams: 1}}\n")
    files = {"api_keys_file": str(keys), "limits_file": str(limits), "batch_file": str(tmp_path / "batches.db")}
    router = await start_router(worker, **files, max_requests=4, max_requests_per_key=1)
    ann = router.openai.with_options(api_key="sk-ann", max_retries=0)
    worker.hang_after, worker.hangs_for_good = 2, True
    several = line("several")
    several["body"]["n"] = 2
    file = await ann.files.create(file=("a.jsonl", jsonl(line("one"), several)), purpose="batch")
    batch = await ann.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=HOUR)
    await asyncio.wait_for(worker.asked.wait(), 20)
    worker.hang_after = None
    for _ in range(3):
        answer = await ann.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Now"}], max_tokens=100
        )
        assert answer.choices[0].message.content == ANSWER
    async with asyncio.timeout(20):
        while (batch := await ann.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2


async def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("something else, and more than a header's length of it" * 100)
    with pytest.raises(StartupError, match=r"^batch_file: "):
        await serve(RouterSettings.model_validate({**SETTINGS, "decode": ("127.0.0.1:1",), "batch_file": str(path)}))


# ------------------------------------------------------------------------------------------- without a router


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BatchStore]:
    store = BatchStore(tmp_path / "batches.db")
    yield store
    store.close()


def added(store: BatchStore, *lines: dict[str, Any], client: ApiClient = NOBODY, window_s: int = 3600) -> str:
    file_id, batch_id = new_file_id(), new_batch_id()
    store.begin_file(file_id, client.owner, "in.jsonl", "batch")
    store.add_part(file_id, 0, jsonl(*lines))
    store.end_file(file_id)
    batch = Batch(
        batch_id=batch_id,
        client=client,
        endpoint=CHAT,
        input_file_id=file_id,
        completion_window_s=window_s,
        created_at=1_000,
    )
    store.add_batch(batch)
    return batch_id


def runner(store: BatchStore, answer: Any, **settings: Any) -> BatchRunner:
    given: dict[str, Any] = {"at_a_time": 2, "priority": 100, "keep_s": 1e9, "look_s": 0.01, **settings}
    return BatchRunner(store, answer, max_line_bytes=lambda: 10_000, clock=lambda: 1_001.0, **given)


async def until(store: BatchStore, batch_id: str, status: BatchStatus) -> Batch:
    async with asyncio.timeout(20):
        while (batch := store.batch(batch_id)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return batch


async def test_what_a_killed_process_left_is_done_once(store: BatchStore) -> None:
    """The first process answers some lines and stops without a word; two others go on once its lease is over."""
    batch_id = added(store, *(line(str(number)) for number in range(20)))
    tries: list[str] = []

    async def answer(_batch: Batch, one: BatchLine) -> LineAnswer:
        tries.append(one.custom_id)
        if len(tries) > 7 and not others:
            await asyncio.Future()
        return LineAnswer(200, "r", b"{}")

    others: list[asyncio.Task[None]] = []
    store._clock = lambda: 1_001.0
    first = runner(store, answer, lease_s=0.3)
    working = asyncio.create_task(first.run())
    async with asyncio.timeout(20):
        while len(tries) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    store.release = lambda worker: None  # type: ignore[method-assign]  # it was killed
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(working, return_exceptions=True)
    store._clock = lambda: 5_000.0  # its lease is over
    others += [asyncio.create_task(runner(store, answer).run()) for _ in range(2)]
    batch = await until(store, batch_id, BatchStatus.COMPLETED)
    assert (batch.num_completed, batch.num_failed) == (20, 0)
    assert batch.output_file_id is not None
    written = [json.loads(one) for one in b"".join(store.content(batch.output_file_id)).splitlines()]
    assert [one["custom_id"] for one in written] == [str(number) for number in range(20)]
    assert set(tries) == {str(number) for number in range(20)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_busy_fleet_is_waited_for_and_faults_are_tried_again(store: BatchStore, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.batches.runner.FIRST_WAIT_S", 0.001)
    batch_id = added(store, line("busy"), line("broken"))
    seen: dict[str, int] = {}

    async def answer(_batch: Batch, one: BatchLine) -> LineAnswer:
        seen[one.custom_id] = seen.get(one.custom_id, 0) + 1
        if one.custom_id == "broken":
            return LineAnswer(500, "r", b"{}")
        return LineAnswer(200 if seen["busy"] == 6 else 429, "r", b"{}")

    working = asyncio.create_task(runner(store, answer).run())
    batch = await until(store, batch_id, BatchStatus.COMPLETED)
    assert (batch.num_completed, batch.num_failed, seen) == (1, 1, {"busy": 6, "broken": 3})
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_a_batch_expires(store: BatchStore) -> None:
    batch_id = added(store, line("a"), line("b"), window_s=0)

    async def answer(_batch: Batch, one: BatchLine) -> LineAnswer:
        await asyncio.Future()
        raise AssertionError

    working = asyncio.create_task(runner(store, answer).run())
    batch = await until(store, batch_id, BatchStatus.EXPIRED)
    assert batch.output_file_id is None
    assert batch.error_file_id is not None
    lines = [json.loads(one) for one in b"".join(store.content(batch.error_file_id)).splitlines()]
    assert [(one["custom_id"], one["error"]["code"]) for one in lines] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


def test_old_things_are_forgotten_unless_they_are_needed(store: BatchStore) -> None:
    store._clock = lambda: 1_000.0
    needed, done = added(store, line("a")), added(store, line("b"))
    store.become(done, BatchStatus.FAILED, of=(BatchStatus.VALIDATING,))
    store.begin_file("file-left", NOBODY.owner, "x", "batch")
    store._clock = lambda: 1_000.0 + 100_000
    assert store.clean(keep_s=1e6) == 1  # the upload that was left
    assert store.clean(keep_s=50_000) == 2
    assert [batch.batch_id for batch in store.listed_batches(NOBODY.owner)] == [needed]
    assert [file.file_id for file in store.listed_files(NOBODY.owner)] == [store.batch(needed).input_file_id]


def test_lines_do_not_depend_on_where_parts_end() -> None:
    data = jsonl(line("a"), line("b")) + json.dumps(line("c")).encode()
    whole = list(split([data], 10_000))
    assert len(whole) == 3
    for size in (1, 7, 100):
        assert list(split([data[at : at + size] for at in range(0, len(data), size)], 10_000)) == whole
    assert [len(one) for one in split([b"x" * 50 + b"\n" + b"y" * 3], 10)] == [11, 3]


def test_numbers_stay_as_they_are() -> None:
    body = {**line("a")["body"], "seed": 2**62 + 1, "temperature": 0.1}
    [read] = read_lines("batch_1", [jsonl(line("a", body=body))], CHAT, 10_000, 100)
    assert isinstance(read, BatchLine)
    assert json.loads(read.body) == {**body, "priority": 100}
    [error] = [one for one in read_lines("batch_1", [b"x" * 20], CHAT, 10, 100) if isinstance(one, LineError)][:1]
    assert "more than 10 bytes" in error.message


async def test_a_store_that_fails_ends_nothing(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may write for long, and a disk may be full."""
    batch_id = added(store, line("a"))
    num_failures = {"lease": 3, "renew": 3}

    def failing(name: str) -> Any:
        real = getattr(store, name)

        def call(*given: Any) -> Any:
            if num_failures[name]:
                num_failures[name] -= 1
                raise sqlite3.OperationalError("database is locked")
            return real(*given)

        return call

    for name in num_failures:
        monkeypatch.setattr(store, name, failing(name))

    async def answer(_batch: Batch, _one: BatchLine) -> LineAnswer:
        while num_failures["renew"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return LineAnswer(200, "r", b"{}")

    working = asyncio.create_task(runner(store, answer).run())
    await until(store, batch_id, BatchStatus.COMPLETED)
    assert not working.done()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_a_store_that_fails_at_the_end_makes_no_failure(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease runs out by itself."""

    def release(_name: str) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store, "release", release)
    working = asyncio.create_task(runner(store, None).run())
    await asyncio.sleep(0.02)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert [record.reason for record in caplog.records if "not released" in record.message] == ["disk I/O error"]  # type: ignore[attr-defined]


async def test_lines_wait_without_a_place_and_each_owner_has_a_turn(store: BatchStore) -> None:
    """Four batches of a key over its limits do not hold up another one's."""
    rich, poor = ApiClient("rich"), ApiClient("poor")
    busy = [added(store, line("a"), line("b"), client=rich) for _ in range(4)]
    other = added(store, line("c"), client=poor)

    async def answer(batch: Batch, _one: BatchLine) -> LineAnswer:
        return LineAnswer(429 if batch.client.name == "rich" else 200, "r", b"{}")

    working = asyncio.create_task(runner(store, answer).run())
    await until(store, other, BatchStatus.COMPLETED)
    assert {store.batch(batch_id).status for batch_id in busy} <= {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS}
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_embeddings(router: RunningRouter) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": "Hello"}}
        for name in "ab"
    ]
    batch = await run(router, jsonl(*lines), endpoint="/v1/embeddings")
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
