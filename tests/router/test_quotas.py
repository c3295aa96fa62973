"""What keys and tenants may ask for, alone and through both interfaces."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest

from common.errors import OverloadedError, StartupError
from common.grpc.status import error_of_call
from common.process.watched_files import WatchedFiles
from protos.baton.v1 import demand_pb2, demand_pb2_grpc, inference_pb2, worker_pb2
from router.fleet.registry import Registry
from router.limits.admission import Admission
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.limits.quotas import BURST_S, Quotas
from router.limits.token_bucket import TokenBucket
from router.running.prefix_hints import PrefixHint, PrefixHints
from router.running.threads import TextThreads
from tests.router.conftest import StartRouter, StartWorker


def test_a_bucket_fills() -> None:
    bucket = TokenBucket(rate=2, burst=4)
    for _ in range(4):
        assert bucket.wait_s(1, 0) == 0
        bucket.take(1, 0)
    assert bucket.wait_s(1, 0) == 0.5
    assert bucket.wait_s(1, 0.5) == 0
    assert bucket.wait_s(3, 100) == 0


def test_a_request_larger_than_a_bucket_goes_when_it_is_full_and_leaves_a_debt() -> None:
    bucket = TokenBucket(rate=10, burst=20)
    assert bucket.wait_s(100, 0) == 0
    bucket.take(100, 0)
    assert bucket.wait_s(1, 0) == pytest.approx(8.1)
    bucket.change(20, 40, 0)
    assert bucket.wait_s(1, 0) == pytest.approx(81 / 20)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


LIMITS = """
default: {requests_per_second: 1}
keys:
  ann: {tokens_per_second: 10, streams: 1}
tenants:
  lab: {requests_per_second: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.yaml"
    path.write_text(LIMITS)
    return path


def test_keys_and_tenants(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(str(path), clock)
    for _ in range(2):
        quotas.request("bob", "")
    with pytest.raises(OverloadedError, match="this key may ask for 1 requests a second") as caught:
        quotas.request("bob", "")
    assert caught.value.retry_after_s == 1
    for number in range(4):
        quotas.request(f"k{number}", "lab")
    with pytest.raises(OverloadedError, match="this tenant may ask for 2 requests"):
        quotas.request("k4", "lab")
    for _ in range(9):
        quotas.request("ann", "")
    quotas.prompt("ann", "", 15)
    quotas.answered("ann", "", 25)
    with pytest.raises(OverloadedError, match="10 tokens") as caught:
        quotas.prompt("ann", "", 5)
    assert caught.value.retry_after_s == pytest.approx(2.5)
    clock.now = 2.5
    quotas.prompt("ann", "", 5)
    with quotas.streams("ann", ""), pytest.raises(OverloadedError, match="may have 1"), quotas.streams("ann", ""):
        raise AssertionError("two at a time")
    with quotas.streams("ann", ""):
        pass


def test_limits_are_read_again(path: Path) -> None:
    clock = Clock()
    quotas = Quotas(str(path), clock)
    quotas.request("bob", "")
    quotas.request("bob", "")
    path.write_text("default: {requests_per_second: 100}\n")
    with pytest.raises(OverloadedError, match="100 requests"):
        quotas.request("bob", "")
    clock.now = 0.02
    quotas.request("bob", "")
    path.write_text("default: {requests_per_second: none}\n")
    clock.now = 1
    quotas.request("bob", "")
    path.write_text("keys: {}\n # all may")
    for _ in range(500):
        quotas.request("bob", "")
    assert quotas._buckets == {}


def test_a_token_costs_no_look_at_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = Quotas(str(path), Clock())
    quotas.request("ann", "lab")
    monkeypatch.setattr(WatchedFiles, "current", lambda _: pytest.fail("the file is looked at"))
    quotas.answered("ann", "lab", 25)
    with pytest.raises(OverloadedError, match="10 tokens"):
        quotas.prompt("ann", "lab", 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: {a: {requests: 1}}", "keys.a.requests"),
        ("default: {streams: 0}", "default.streams"),
        ("[", "is not YAML"),
        ("- 1", "the file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(StartupError, match=f"limits_file: .*{words}"):
        Quotas(str(path))


async def test_a_key_that_asks_too_often_is_told_when_to_come_again(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.yaml"
    keys.write_text("key-a name=ann tenant=lab\nkey-b name=bob\n")
    limits.write_text("keys: {ann: {requests_per_second: 0.025}}\n")
    router = await start_router(await start_worker(), api_keys_file=str(keys), limits_file=str(limits))
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}

    async def post(key: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(f"{router.url}/v1/completions", json=body, headers=headers, timeout=30)

    assert (await post("key-a")).status_code == 200
    refused = await post("key-a")
    assert refused.status_code == 429
    assert 30 <= int(refused.headers["retry-after"]) <= 40
    metadata = (("authorization", "Bearer key-a"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in router.inference.Generate(inference_pb2.GenerateRequest(prompt="a"), metadata=metadata)]
    error = error_of_call(caught.value.code().name, caught.value.details() or "", caught.value.trailing_metadata())
    assert isinstance(error, OverloadedError)
    assert 10 <= (error.retry_after_s or 0) <= 40
    assert [(await post("key-b")).status_code for _ in range(3)] == [200] * 3


async def test_a_router_with_one_place_answers_one_after_another(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = await start_worker()
    worker.delay_s = 0.02
    router = await start_router(worker, max_running=1, max_queued=2)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
    async with httpx.AsyncClient() as client:
        posts = [client.post(f"{router.url}/v1/completions", json=body, timeout=30) for _ in range(5)]
        codes = sorted(answer.status_code for answer in await asyncio.gather(*posts))
    assert codes == [200, 200, 200, 429, 429]


async def test_batches_make_no_way_for_a_request_that_is_refused(path: Path) -> None:
    demand = Demand()
    admission = Admission(Registry([], []), demand, Gate(), quotas=Quotas(str(path), Clock()))
    changes: list[int] = []
    demand.changed = lambda: changes.append(demand.num_of_clients)
    for _ in range(2):
        with admission.running("rest"):
            pass
    assert changes == [1, 0, 1, 0]
    with pytest.raises(OverloadedError), admission.running("rest"):
        raise AssertionError("three at once")
    assert changes == [1, 0, 1, 0]
    assert (demand.num_requests, admission.num_running) == (3, 0)
    await asyncio.wait_for(admission.idle(), 60)


async def test_each_answer_counts_and_so_does_tokenizing(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {requests_per_second: 0.5}\n")
    router = await start_router(await start_worker(), limits_file=str(limits))
    body = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=router.url) as client:
        first = await client.post("/v1/completions", json=body, timeout=30)
        assert first.status_code == 200, "a bucket that is full takes a request of any size"
        later = await client.post("/v1/completions", json=body, timeout=30)
        assert (later.status_code, int(later.headers["retry-after"]) >= 10) == (429, True)
        for path, content in (("/tokenize", {"text": "a"}), ("/detokenize", {"token_ids": [1]})):
            assert (await client.post(path, json=content)).status_code == 429
    for call in (
        router.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
        router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1])),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_answers_of_one_body_count_together(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {tokens_per_second: 10, streams: 4}\n")
    router = await start_router(await start_worker(), limits_file=str(limits))
    body = {"model": "tiny", "prompt": [[5] * 15, [6] * 15], "n": 2, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.post("/v1/completions", json=body, timeout=30)).status_code == 200
        refused = await client.post("/v1/completions", json=body, timeout=30)
        assert (refused.status_code, 3 <= int(refused.headers["retry-after"]) <= 7) == (429, True)
        for more, field in (
            ({"n": 3}, "prompt"),
            ({"prompt": "a", "n": 5}, "n"),
            ({"prompt": "a", "best_of": 9}, "best_of"),
        ):
            never = await client.post("/v1/completions", json={**body, "n": 1, **more}, timeout=30)
            assert (never.status_code, never.json()["error"]["param"]) == (400, field)


async def test_who_gets_no_place_keeps_its_tokens(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {tokens_per_second: 20}\n")
    worker = await start_worker()
    worker.hang_after = 1
    router = await start_router(worker, limits_file=str(limits), max_running=1, max_queue_wait=0.05)
    body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 8}
    running = asyncio.create_task(router.openai.completions.create(**body))  # type: ignore[call-overload]
    await worker.asked.wait()
    async with httpx.AsyncClient(base_url=router.url) as client:
        for number in range(6):
            path, content = ("/v1/completions", body) if number % 2 else ("/v1/embeddings", {"input": [[5] * 8] * 2})
            refused = await client.post(path, json=content, timeout=30)
            assert "waited 0.05 s" in refused.json()["error"]["message"]
    running.cancel()


async def test_answers_that_never_began_keep_their_tokens(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    """There is one place. The first answer fails in it, and most of the other seven wait for it still. Of 120 tokens a
    body asks for 80: if they were not given back, too few were left for the second one."""
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {tokens_per_second: 60}\n")
    worker = await start_worker()
    worker.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "no")
    router = await start_router(worker, limits_file=str(limits), max_running=1)
    body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 8, "n": 8}
    async with httpx.AsyncClient(base_url=router.url) as client:
        for _ in range(2):
            refused = await client.post("/v1/completions", json=body, timeout=30)
            assert refused.status_code == 400
    assert 2 <= len(worker.requests) <= 6


async def test_embeddings_count(start_worker: StartWorker, start_router: StartRouter, tmp_path: Path) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.yaml"
    keys.write_text("key-a name=ann\nkey-b name=bob\n")
    limits.write_text("keys: {ann: {tokens_per_second: 5}, bob: {streams: 1}}\n")
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(keys), limits_file=str(limits), max_running=1)

    async def embed(key: str, *inputs: list[int]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=router.url) as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post("/v1/embeddings", json={"input": inputs}, headers=headers, timeout=30)

    assert (await embed("key-a", [1] * 30, [2] * 30)).status_code == 200
    refused = await embed("key-a", [1])
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 9) == (429, True)
    worker.delay_s, worker.asked = 0.1, asyncio.Event()
    codes = [answer.status_code for answer in await asyncio.gather(*(embed("key-b", [1]) for _ in range(3)))]
    assert sorted(codes) == [200, 429, 429]
    worker.most_embedding = 0
    assert (await embed("key-b", [1], [2], [3], [4])).status_code == 200
    assert worker.most_embedding == 1, "each input has its turn"


async def test_autoscalers_see_what_waits(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.hang_after = 1
    router = await start_router(worker, max_running=1)
    prompts: list[object] = [[5] * 10, [6] * 20]
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        asking = [client.post("/v1/completions", json={"model": "tiny", "prompt": prompt}) for prompt in prompts]
        tasks = [asyncio.create_task(one) for one in asking]
        await worker.asked.wait()
        tasks.append(asyncio.create_task(client.post("/v1/embeddings", json={"input": prompts})))
        async with asyncio.timeout(30):
            async for demand in demand_pb2_grpc.DemandServiceStub(router.channel).WatchDemand(
                demand_pb2.WatchDemandRequest()
            ):
                if demand.num_prompt_tokens_total == 60:
                    break
        assert (len(worker.requests), len(worker.embedded)) == (1, 0), "the others have no place yet"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_hints_count_as_prompts(start_worker: StartWorker, start_router: StartRouter, tmp_path: Path) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.yaml"
    keys.write_text("key-a name=ann\nkey-b name=bob tenant=lab\n")
    limits.write_text("keys: {ann: {tokens_per_second: 5}}\ntenants: {lab: {tokens_per_second: 5}}\n")
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(keys), limits_file=str(limits))

    async def hint(key: str, action: str, num_tokens: int) -> int:
        async with httpx.AsyncClient(base_url=router.url) as client:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": [1] * num_tokens, **({"seconds": 9} if action == "retain" else {})}
            return (await client.post(f"/v1/cache/{action}", json=body, headers=headers)).status_code

    for key in ("key-a", "key-b"):
        for action in ("retain", "evict", "prefetch"):
            assert await hint(key, action, 10) == 200, "it has no full block: nobody is asked, and it costs nothing"
        assert await hint(key, "evict", 60) == 200
        for action in ("retain", "evict", "prefetch"):
            assert await hint(key, action, 60) == 429
    assert len(worker.hints) == 2


async def test_a_hint_that_nobody_is_asked_for_keeps_its_tokens(tmp_path: Path) -> None:
    """Names are made in the threads of texts, which may be too busy."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"default: {{tokens_per_second: {10_000 / BURST_S}}}")
    threads, quotas = TextThreads(1, max_waiting=0), Quotas(str(path), lambda: 0.0)
    release = threading.Event()
    busy = asyncio.create_task(threads.run(10**6, lambda: release.wait(60)))
    await asyncio.sleep(0)
    model = SimpleNamespace(block_names=list)
    admission = Admission(Registry([], []), Demand(), Gate(), quotas=quotas)
    hints = PrefixHints(None, None, admission, threads)  # type: ignore[arg-type] # neither is asked
    hint = PrefixHint(model=model, token_ids=[1] * 10_000, cache_salt="")  # type: ignore[arg-type]
    with pytest.raises(OverloadedError, match="too many long texts"):
        await hints.give(hint, worker_pb2.CACHE_ACTION_EVICT)
    quotas.prompt("", "", 10_000)  # as many as there ever are: they were given back
    with pytest.raises(OverloadedError, match="tokens a second"):
        quotas.prompt("", "", 1)
    release.set()
    await busy
    threads.close()
