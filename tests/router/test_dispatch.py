"""What a request goes through when workers fail: through real sockets, with the answer known beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
import httpx
import openai
import pytest

from common.errors import InvalidArgumentError, OverloadedError, SlowReaderError, UnavailableError
from common.grpc.status import error_of_call
from common.retry_budget import RetryBudget
from common.types import WorkerRole
from protos.baton.v1 import inference_pb2, types_pb2, worker_pb2
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.patience import Patience
from router.fleet.registry import Registry
from router.fleet.worker import Sent, WorkerRecord
from router.policy.base import Reasons, RoutingDecision, RoutingRequest
from router.running.dispatch import Dispatcher
from router.running.request import Progress
from router.running.retries import DispatchLimits, Retries
from router.running.routes import Routes
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches, sample
from tests.router.test_answer import requests
from tests.router.tiny_tokenizer import byte_ids, eos_id
from tests.support.fake_worker import ANSWER, FakeWorker


async def ask(router: RunningRouter, **params: object) -> tuple[str, list[int], inference_pb2.GenerateResponse]:
    """(text, token ids, last response)."""
    request = inference_pb2.GenerateRequest(
        request_id="r",
        prompt="Hello",
        sampling_params=types_pb2.SamplingParams(**params),  # type: ignore[arg-type]
    )
    responses = [response async for response in router.inference.Generate(request)]
    text = "".join(response.text for response in responses)
    return text, [t for response in responses for t in response.token_ids], responses[-1]


@pytest.fixture
async def pair(start_worker: StartWorker) -> tuple[FakeWorker, FakeWorker]:
    """Two decode workers; the first is the less loaded one."""
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    return first, second


async def test_answers_to_one_prompt_go_to_one_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker(), await start_worker()]
    router = await start_router(*workers)
    await router.openai.completions.create(model="tiny", prompt=["one", "two"], n=4, max_tokens=3)
    prompts = [{tuple(request.prompt_token_ids) for request in worker.requests} for worker in workers]
    assert prompts[0].isdisjoint(prompts[1])
    assert sum(len(worker.requests) for worker in workers) == 8
    assert all(prompts)  # those to another prompt go where there is less to do


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("fault", ["die_after", "end_after"])
async def test_migration_gives_each_token_once(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter, fault: str, num_tokens: int
) -> None:
    first, second = pair
    router = await start_router(*pair)
    before = sample("baton_router_migrations_total", reason="UNAVAILABLE")
    setattr(first, fault, num_tokens)
    text, token_ids, last = await ask(router)
    assert text == ANSWER
    assert token_ids == [*first.answer, eos_id()]
    assert list(second.requests[0].output_token_ids) == first.answer[:num_tokens]
    assert second.requests[0].sampling_params == first.requests[0].sampling_params
    assert (last.report.num_migrations, last.report.num_retries) == (1, 0)
    assert last.report.decode_worker == second.address
    assert last.usage.completion_tokens == len(token_ids)
    assert sample("baton_router_migrations_total", reason="UNAVAILABLE") == before + 1


async def test_a_request_counts_with_all_that_it_begins_with(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a migration, what was answered before is context, too."""
    sent: list[tuple[str, int]] = []
    send = WorkerRecord.send

    def noted(record: WorkerRecord, key: object, one: Sent) -> None:
        sent.append((record.address, one.num_context))
        send(record, key, one)

    monkeypatch.setattr(WorkerRecord, "send", noted)
    first, second = pair
    first.die_after = 3
    await ask(await start_router(*pair))
    num_prompt = len(first.requests[0].prompt_token_ids)
    assert sent == [(first.address, num_prompt), (second.address, num_prompt + 3)]


async def test_the_report_tells_what_a_lost_worker_went_through(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    first, _ = pair
    first.first_report = types_pb2.RequestReport(
        num_retries=1, fallback_reason="disk full", num_blocks_moved=5, num_bytes_moved=80, num_preemptions=1
    )
    first.die_after = 3
    _, _, last = await ask(await start_router(*pair))
    report = last.report
    assert (report.num_migrations, report.num_retries, report.num_preemptions) == (1, 1, 1)
    assert report.fallback_reason == "disk full"
    assert (report.num_blocks_moved, report.num_bytes_moved) == (5 + 2, 80 + 64)
    assert report.decode_worker == pair[1].address


async def test_migration_in_the_middle_of_a_character(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    for worker in pair:
        worker.answer = byte_ids("a😀東京b")
    pair[0].die_after = 3
    text, _, last = await ask(await start_router(*pair))
    assert text == "a😀東京b"
    assert last.report.num_migrations == 1


async def test_a_worker_killed_in_mid_stream(pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter) -> None:
    first, second = pair
    first.hang_after = 4
    router = await start_router(*pair)
    asking = asyncio.create_task(ask(router))
    await first.asked.wait()
    await first.stop()
    text, token_ids, last = await asking
    assert text == ANSWER
    assert token_ids == [*second.answer, eos_id()]
    assert last.report.num_migrations + last.report.num_retries == 1


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
    ],
)
async def test_a_worker_that_refuses_is_replaced_before_the_first_token(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter, code: grpc.StatusCode
) -> None:
    pair[0].refuse = (code, "no")
    text, _, last = await ask(await start_router(*pair))
    assert text == ANSWER
    assert (last.report.num_retries, last.report.num_migrations) == (1, 0)
    assert list(pair[1].requests[0].output_token_ids) == []


async def test_the_only_worker_is_asked_again_once_it_is_back(worker: FakeWorker, router: RunningRouter) -> None:
    worker.die_after = 9
    text, token_ids, last = await ask(router)
    assert text == ANSWER
    assert token_ids == [*worker.answer, eos_id()]
    assert last.report.num_migrations == len(worker.requests) - 1 > 0


async def test_a_restarted_worker_takes_over_from_itself(worker: FakeWorker, router: RunningRouter) -> None:
    worker.hang_after = 3
    asking = asyncio.create_task(ask(router))
    await worker.asked.wait()
    await worker.stop()
    worker.hang_after, worker.epoch = None, "e2"
    await worker.start(worker.address)
    text, _, _ = await asking
    assert text == ANSWER


async def lost(worker: FakeWorker) -> None:
    await worker.stop()
    await reaches("baton_router_endpoints", 1, role="decode", state="unreachable")


async def test_a_request_waits_for_a_worker_that_was_there_a_moment_ago(
    worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, patience=Patience(reconnect_wait_s=60.0, lost_lately_s=60.0))
    await lost(worker)
    asking = asyncio.create_task(ask(router))
    await reaches("baton_router_requests_running", 1)
    await worker.start(worker.address)
    text, _, last = await asking
    assert text == ANSWER
    assert (last.report.num_retries, last.report.num_migrations) == (0, 0)


async def test_a_request_does_not_wait_for_a_worker_that_was_lost_long_ago(
    worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, patience=Patience(reconnect_wait_s=3600.0, lost_lately_s=0.0))
    await lost(worker)
    with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is ready"):
        await ask(router)


async def test_the_wait_for_a_lost_worker_is_bounded(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, patience=Patience(reconnect_wait_s=0.2, lost_lately_s=3600.0))
    await lost(worker)
    with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is ready"):
        await ask(router)


async def test_an_end_that_was_not_announced(worker: FakeWorker, router: RunningRouter) -> None:
    worker.die_after = 5
    text, token_ids, last = await ask(router, max_tokens=5)
    assert len(token_ids) == 5
    assert ANSWER.startswith(text)
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_worker_refusing_the_request_itself_is_believed(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    pair[0].refuse = InvalidArgumentError("sampling_params.max_tokens", "can never fit: blocks are few")
    router = await start_router(*pair)
    with pytest.raises(grpc.aio.AioRpcError, match="can never fit") as caught:
        await ask(router)
    error = error_of_call(caught.value.code().name, caught.value.details() or "", caught.value.trailing_metadata())
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.reason) == ("sampling_params.max_tokens", "can never fit: blocks are few")
    assert pair[1].requests == []


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling_params.max_tokens", "max_completion_tokens"),
        ("sampling_params.logprobs", "top_logprobs"),
        ("sampling_params.seed", "seed"),
        ("prompt_token_ids", "messages"),
        ("cache_salt", "cache_salt"),
        ("", None),
    ],
)
async def test_what_a_worker_refuses_bears_the_clients_name(
    worker: FakeWorker, router: RunningRouter, field: str, param: str | None
) -> None:
    worker.refuse = InvalidArgumentError(field, "is of no use: none")
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=3
        )
    assert caught.value.param == param
    assert caught.value.body["message"].endswith("is of no use: none")  # type: ignore[index]


async def test_retries_are_few_if_every_worker_fails(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        worker.refuse = (grpc.StatusCode.INTERNAL, "broken")
    router = await start_router(*workers)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [len(worker.requests) for worker in workers] == [1, 1, 1]


async def test_retries_cannot_storm(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Every worker fails, whoever asks: from some time on requests are not sent a second time, and that is counted."""
    workers = [await start_worker(), await start_worker()]
    for worker in workers:
        worker.refuse = (grpc.StatusCode.INTERNAL, "broken")
    router = await start_router(*workers)
    before, started = sample("baton_router_retries_refused_total"), time.monotonic()
    reasons: list[str] = []

    async def fail() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(router)
        reasons.append(caught.value.details() or "")

    async with asyncio.timeout(60):
        while not any("retry budget is spent" in reason for reason in reasons):
            await asyncio.gather(*(fail() for _ in range(50)))
    num_refused = sum("retry budget is spent" in reason for reason in reasons)
    assert sample("baton_router_retries_refused_total") == before + num_refused
    num_retries = sum(len(worker.requests) for worker in workers) - len(reasons)
    assert num_retries <= 100 + 0.2 * len(reasons) + 10 * (time.monotonic() - started)


async def test_a_draining_worker_gets_nothing_new(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    first, second = pair
    router = await start_router(*pair)
    assert (await ask(router))[2].report.decode_worker == first.address
    first.change(state=worker_pb2.WORKER_STATE_DRAINING)
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")
    for _ in range(3):
        assert (await ask(router))[2].report.decode_worker == second.address


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
async def test_a_draining_worker_hands_over(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter, num_tokens: int
) -> None:
    first, second = pair
    router = await start_router(*pair)
    before = sample("baton_router_migrations_total", reason="drain")
    first.offer_after = first.hang_after = num_tokens
    text, token_ids, last = await ask(router)
    assert text == ANSWER
    assert token_ids == [*first.answer, eos_id()]
    assert list(second.requests[0].output_token_ids) == first.answer[:num_tokens]
    assert (last.report.num_migrations, last.report.num_handovers, last.report.num_retries) == (1, 1, 0)
    assert last.report.decode_worker == second.address
    assert sample("baton_router_migrations_total", reason="drain") == before + 1
    await asyncio.wait_for(first.cancelled.wait(), 30)


async def test_nothing_is_handed_over_to_nobody(worker: FakeWorker, router: RunningRouter) -> None:
    worker.offer_after = 2
    text, token_ids, last = await ask(router)
    assert text == ANSWER
    assert token_ids == [*worker.answer, eos_id()]
    assert (last.report.num_migrations, len(worker.requests)) == (0, 1)


async def test_an_offer_is_taken_once_another_worker_is_there(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    first, second = pair
    router = await start_router(*pair)
    second.change(state=worker_pb2.WORKER_STATE_DRAINING)
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")
    first.offer_after = first.hang_after = 3
    asking = asyncio.create_task(ask(router))
    await first.asked.wait()
    await asyncio.sleep(0.2)
    assert not first.cancelled.is_set()
    second.change(state=worker_pb2.WORKER_STATE_READY)
    text, token_ids, last = await asking
    assert text == ANSWER
    assert token_ids == [*first.answer, eos_id()]
    assert (last.report.num_migrations, last.report.num_handovers) == (1, 1)
    assert list(second.requests[0].output_token_ids) == first.answer[:3]


async def test_handovers_are_not_limited_and_cost_no_retries(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    """A rolling update may meet a long answer at each worker. A worker that fails meanwhile is still replaced."""
    workers = [await start_worker() for _ in range(4)]
    workers[0].num_requests_waiting, workers[1].num_requests_waiting = 1, 2
    workers[2].num_requests_waiting, workers[3].num_requests_waiting = 3, 4
    workers[0].offer_after = workers[1].offer_after = 1
    workers[2].die_after = 1
    limits = DispatchLimits(num_retries=0, num_migrations=1, recovery_wait_s=0)
    text, token_ids, last = await ask(await start_router(*workers, limits=limits))
    assert text == ANSWER
    assert token_ids == [*workers[0].answer, eos_id()]
    assert (last.report.num_migrations, last.report.num_handovers) == (3, 2)


async def test_a_burst_spreads_before_the_next_report(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        worker.delay_s = 0.01
    router = await start_router(*workers)
    await asyncio.gather(*(ask(router) for _ in range(9)))
    assert [len(worker.requests) for worker in workers] == [3, 3, 3]


async def test_prefill_workers_are_named_to_the_decode_worker(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    decode, prefill = await start_worker(), await start_worker(WorkerRole.PREFILL)
    await ask(await start_router(decode, prefill=(prefill,), min_remote_tokens=1))
    assert list(decode.requests[-1].prefill_addresses) == [prefill.address]
    assert decode.requests[-1].min_remote_tokens == 1
    await ask(await start_router(decode, prefill=(prefill,)))
    assert list(decode.requests[-1].prefill_addresses) == [], "the prompt is shorter than a block"


async def test_prefill_retries_have_a_budget_too(start_worker: StartWorker, start_router: StartRouter) -> None:
    """If it is spent, the decode worker has only one to ask; when time has filled it again, all of them."""
    decode = await start_worker()
    prefill = [await start_worker(WorkerRole.PREFILL) for _ in range(2)]
    router = await start_router(decode, prefill=prefill, min_remote_tokens=1)

    async def num_named() -> int:
        await ask(router)
        return len(decode.requests[-1].prefill_addresses)

    assert await num_named() == 2
    decode.first_report = types_pb2.RequestReport(num_retries=200)
    async with asyncio.timeout(60):
        while await num_named() > 1:
            pass
        decode.first_report = None
        while await num_named() < 2:  # noqa: ASYNC110 - nothing tells that time has filled it
            await asyncio.sleep(0.1)


async def test_workers_of_both_roles_prefill_in_place(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = (await start_worker(WorkerRole.BOTH), await start_worker(WorkerRole.BOTH))
    router = await start_router(*workers, prefill=workers)
    for _ in range(4):
        await ask(router)
    requests = [request for worker in workers for request in worker.requests]
    assert [list(request.prefill_addresses) for request in requests] == [[]] * 4


async def test_other_models_and_roles_are_excluded(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Whichever decode worker answers first decides what is served."""
    kinds = {("f1", "tiny"): {}, ("f2", "tiny"): {"fingerprint": "f2"}, ("f1", "other"): {"model": "other"}}
    workers = [await start_worker(**attributes) for attributes in kinds.values() for _ in range(2)]
    no_decode = await start_worker(WorkerRole.PREFILL)
    router = await start_router(*workers, no_decode)
    for _ in range(6):
        await ask(router)
    used = [worker for worker in workers if worker.requests]
    assert len(used) == 2
    assert len({(worker.fingerprint, worker.model) for worker in used}) == 1
    assert no_decode.requests == []


@pytest.mark.parametrize("has_budget", [True, False])
async def test_load_is_told_as_load(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, has_budget: bool
) -> None:
    """Every worker is full, and says when to come again: so does the router, with or without retries left."""
    for worker in pair:
        worker.refuse = OverloadedError("too many wait", retry_after_s=7.0)
    if not has_budget:
        monkeypatch.setattr(RetryBudget, "spend", lambda _self, _now: False)
    router = await start_router(*pair)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_of_call("RESOURCE_EXHAUSTED", "", caught.value.trailing_metadata())
    assert error.retry_after_s == 7.0
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


async def test_a_stream_that_was_not_read_is_tried_nowhere_else(
    pair: tuple[FakeWorker, FakeWorker], start_router: StartRouter
) -> None:
    for worker in pair:
        worker.refuse = SlowReaderError("the caller left 2048 events of its stream unread")
    router = await start_router(*pair)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert caught.value.details() == "the caller left 2048 events of its stream unread"
    assert len(pair[0].requests) + len(pair[1].requests) == 1


def test_retry_budget_is_a_share_of_requests_and_a_floor() -> None:
    budget = RetryBudget(ratio=0.2, floor_per_s=1.0, window_s=10.0)
    assert sum(budget.spend(0.0) for _ in range(50)) == 10
    for _ in range(25):
        budget.request()
    assert sum(budget.spend(0.0) for _ in range(50)) == 5
    assert sum(budget.spend(3.0) for _ in range(50)) == 3
    assert sum(budget.spend(1000.0) for _ in range(50)) == 10


class _Gone:
    """Chooses a worker that has just ceased to be one."""

    def pick(self, request: RoutingRequest, workers: Fleet | Sequence[Endpoint]) -> RoutingDecision:
        if request.tried:
            raise UnavailableError("no decode worker can take the request")
        return RoutingDecision(
            decode=Endpoint(worker_id="w", role=WorkerRole.DECODE, address="127.0.0.1:1"), prefill=(), reasons=Reasons()
        )


async def test_a_worker_that_is_none_any_more_is_a_lost_one() -> None:
    nobody = Registry([], [])
    retries = Retries(nobody, DispatchLimits(recovery_wait_s=0.0))
    dispatcher = Dispatcher(nobody, Routes(nobody, _Gone()), retries)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 is no worker any more"):
        _ = [new async for new in dispatcher.run(requests(1)[0], Progress())]
