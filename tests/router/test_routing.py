"""Where requests go and who may ask why: through both interfaces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from common.types import WorkerRole
from protos.baton.v1 import inference_pb2
from router.fleet.track_record import MAX_FAILURES, TrackRecord
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches

BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}


async def complete(router: RunningRouter, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{router.url}/v1/completions", json={**BODY, **body}, headers=headers, timeout=30)


async def decisions(router: RunningRouter, query: str = "", key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient() as client:
        return await client.get(f"{router.url}/decisions{query}", headers=headers)


async def test_an_answer_tells_its_routing_if_asked(router: RunningRouter) -> None:
    silent = (await complete(router)).json()
    assert "routing" not in silent["baton"]
    told = (await complete(router, {"X-Baton-Explain": "true"})).json()["baton"]["routing"]
    assert [line.partition(":")[0] for line in told] == ["new", "new"]
    assert "(load" in told[0]
    assert "there is no prefill worker" in told[1]
    request = inference_pb2.GenerateRequest(prompt="Hello")
    responses = [r async for r in router.inference.Generate(request, metadata=(("x-baton-explain", "true"),))]
    assert list(responses[-1].report.routing) == told
    wrong = await complete(router, {"X-Baton-Explain": "maybe"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-baton-explain")


async def test_decisions_are_kept(start_worker: StartWorker, start_router: StartRouter) -> None:
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    router = await start_router(first, second)
    await complete(router, request_id="one")
    first.die_after = 1
    await complete(router, request_id="two")
    kept = (await decisions(router)).json()["decisions"]
    assert [(one["request_id"], one["cause"], one["decode_worker"]) for one in kept] == [
        ("two", "migration", second.address),
        ("two", "new", first.address),
        ("one", "new", first.address),
    ]
    assert kept[0]["in_place"] is True
    assert kept[0]["prompt_tokens"] > 0
    assert any(reason.startswith(f"{first.address}: ") for reason in kept[0]["reasons"])
    assert len((await decisions(router, "?limit=1")).json()["decisions"]) == 1
    for wrong in ("0", "513", "000001" + "9" * 5000, "0" * 20 + "1", "one"):
        assert (await decisions(router, f"?limit={wrong}")).status_code == 400


async def test_a_tenant_sees_its_own_decisions(
    start_worker: StartWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a name=ann tenant=a\nkey-b name=bob tenant=b\nkey-n name=none\nkey-o name=ops operator=true\n")
    router = await start_router(await start_worker(), api_keys_file=str(keys))
    for key in ("key-a", "key-b", "key-n"):
        await complete(router, {"Authorization": f"Bearer {key}"})
    seen = {key: (await decisions(router, key=key)).json()["decisions"] for key in ("key-a", "key-b", "key-n", "key-o")}
    assert {key: [one["client"] for one in made] for key, made in seen.items()} == {
        "key-a": ["ann"], "key-b": ["bob"], "key-n": ["none"], "key-o": ["none", "bob", "ann"],
    }  # fmt: skip
    assert (await decisions(router)).status_code == 401


@pytest.mark.parametrize("way", ["header", "prompt_cache_key", "user", "grpc"])
async def test_a_session_goes_to_one_worker(start_worker: StartWorker, start_router: StartRouter, way: str) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="session")
    for _ in range(4):
        if way == "grpc":
            request = inference_pb2.GenerateRequest(prompt="Hello")
            _ = [r async for r in router.inference.Generate(request, metadata=(("x-session-id", "s1"),))]
        elif way == "header":
            assert (await complete(router, {"X-Session-Id": "s1"}, user="other")).status_code == 200
        else:
            assert (await complete(router, None, **{way: "s1"})).status_code == 200
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 4]


async def test_a_session_is_no_novel(router: RunningRouter) -> None:
    answer = await complete(router, {"X-Session-Id": "x" * 513})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id")
    with pytest.raises(openai.BadRequestError, match="user"):
        await router.openai.completions.create(model="tiny", prompt="a", extra_body={"user": ["a"]})


async def test_a_worker_that_fails_again_and_again_is_left_alone(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    bad, good = await start_worker(), await start_worker()
    good.num_requests_waiting = 5
    bad.refuse = (grpc.StatusCode.INTERNAL, "out of order")
    router = await start_router(bad, good)
    for _ in range(8):
        assert (await complete(router)).status_code == 200
    assert len(bad.requests) == MAX_FAILURES
    last = (await decisions(router, "?limit=1")).json()["decisions"][0]
    assert any("after 5 failures in a row" in reason for reason in last["reasons"])


async def test_workers_get_no_parameter_that_they_would_not_notice(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    older, newer = await start_worker(), await start_worker()
    older.is_older, newer.num_requests_waiting = True, 5
    router = await start_router(older, newer)
    assert (await complete(router)).status_code == 200
    assert (len(older.requests), len(newer.requests)) == (1, 0)
    for given in ({"guided_regex": "a"}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"prompt_logprobs": 0}):
        assert (await complete(router, **given)).status_code == 200, given
    assert (len(older.requests), len(newer.requests)) == (1, 4)
    await newer.stop()
    await reaches("baton_router_endpoints", 1, role="decode", state="unreachable")
    refused = await complete(router, guided_regex="a")
    assert refused.status_code == 503
    assert "is of a version that does not know guided" in refused.json()["error"]["message"]


async def test_a_prefill_worker_is_probed_until_the_first_token(
    start_worker: StartWorker, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = await start_worker(), await start_worker(WorkerRole.PREFILL)
    ended: list[str] = []
    monkeypatch.setattr(TrackRecord, "began", lambda *_: True)
    monkeypatch.setattr(TrackRecord, "ended", lambda _, worker: ended.append(worker[0]))
    decode.hang_after = 1
    router = await start_router(decode, prefill=(prefill,))
    stream = await router.openai.completions.create(model="tiny", prompt="Hello " * 60, stream=True)
    await anext(aiter(stream))
    assert ended == [prefill.address]
    await stream.close()
    await decode.cancelled.wait()
    async with asyncio.timeout(20):
        while len(ended) < 2:  # noqa: ASYNC110 (a list cannot be awaited)
            await asyncio.sleep(0.005)
    assert ended == [prefill.address, decode.address]
