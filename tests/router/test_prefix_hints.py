"""Which blocks of a prompt workers are asked to keep for a while, or to forget, over gRPC and REST."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest

from common.block_hash import block_hashes, extra_keys, root_hash
from common.types import WorkerRole
from protos.baton.v1 import inference_pb2, worker_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_grpc import violated_field
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import FakeWorker

TOKENS = list(range(1, 41))  # two full blocks of 16 tokens


def names(token_ids: list[int], salt: str = "") -> bytes:
    return b"".join(block_hashes(root_hash("f1"), token_ids, 16, extra_keys(cache_salt=salt)))


async def post(router: RunningRouter, path: str, body: dict[str, object], key: str = "") -> httpx.Response:
    async with httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await client.post(f"{router.url}/v1/cache/{path}", json=body, headers=headers)


async def test_both_interfaces_ask_every_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    decode, prefill, stranger = (
        await start_worker(),
        await start_worker(WorkerRole.PREFILL),
        await start_worker(WorkerRole.PREFILL, fingerprint="f2"),
    )
    router = await start_router(decode, prefill=(prefill, stranger))
    prefix = inference_pb2.Prefix(prompt_token_ids=TOKENS, cache_salt="s")
    told = await router.inference.RetainPrefix(inference_pb2.RetainPrefixRequest(prefix=prefix, seconds=60))
    answer = await post(router, "retain", {"prompt": TOKENS, "cache_salt": "s", "seconds": 60})
    assert answer.json() == {
        "num_tokens": 32,
        "num_blocks": 2,
        "workers": [
            {
                "address": one.address,
                "num_device_blocks": 1,
                "num_host_blocks": 1,
                "num_stored_blocks": 2,
                "error": "",
            }
            for one in (decode, prefill)
        ],
    }
    assert (told.num_tokens, told.num_blocks) == (32, 2)
    assert [(one.address, one.num_device_blocks, one.num_stored_blocks) for one in told.workers] == [
        (decode.address, 1, 2),
        (prefill.address, 1, 2),
    ]
    asked = worker_pb2.HintCacheRequest(
        fingerprint="f1",
        action=worker_pb2.CACHE_ACTION_RETAIN,
        block_hashes=names(TOKENS, "s"),
        seconds=60,
        tenant="key ",
    )
    assert decode.hints == prefill.hints == [asked, asked]
    assert stranger.hints == []


async def test_a_conversation_is_meant_as_it_is_asked(router: RunningRouter, worker: FakeWorker) -> None:
    text = "one two three four five six seven eight nine ten " * 4
    prompt = ids_of(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    prefix = inference_pb2.Prefix(messages=[inference_pb2.ChatMessage(role="user", content=text)], num_tokens=33)
    told = await router.inference.EvictPrefix(inference_pb2.EvictPrefixRequest(prefix=prefix))
    answer = await post(router, "evict", {"messages": [{"role": "user", "content": text}], "num_tokens": 33})
    assert (told.num_blocks, answer.json()["num_blocks"]) == (2, 2)
    assert [one.block_hashes for one in worker.hints] == [names(prompt[:33])] * 2
    assert {one.action for one in worker.hints} == {worker_pb2.CACHE_ACTION_EVICT}


async def test_a_prefetch_goes_where_the_prompt_would_go(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    prefill = await start_worker(WorkerRole.PREFILL)
    router = await start_router(*workers, prefill=(prefill,), policy="session")
    headers = {"x-session-id": "mine"}
    async with httpx.AsyncClient() as client:
        url, body = f"{router.url}/v1/cache/prefetch", {"prompt": TOKENS}
        answers = [(await client.post(url, json=body, headers=headers)).json()]
        answers += [
            (await client.post(url, json={**body, name: "mine"})).json() for name in ("prompt_cache_key", "user")
        ]
    prefix = inference_pb2.Prefix(prompt_token_ids=TOKENS)
    told = await router.inference.PrefetchPrefix(
        inference_pb2.PrefetchPrefixRequest(prefix=prefix), metadata=tuple(headers.items())
    )
    generate = inference_pb2.GenerateRequest(prompt_token_ids=TOKENS)
    async for _ in router.inference.Generate(generate, metadata=tuple(headers.items())):
        pass
    (chosen,) = [worker for worker in workers if worker.requests]
    assert [one.action for one in chosen.hints] == [worker_pb2.CACHE_ACTION_PREFETCH] * 4
    assert [one.address for one in told.workers] == [chosen.address]
    for answer in answers:
        assert [one["address"] for one in answer["workers"]] == [chosen.address]
    assert not prefill.hints
    assert sum(len(worker.hints) for worker in workers) == 4


async def test_a_tenant_reaches_its_own_blocks_only(
    worker: FakeWorker, start_router: StartRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a name=a tenant=research\nsk-b name=b\n")
    router = await start_router(worker, api_keys_file=str(keys))
    assert (await post(router, "evict", {"prompt": TOKENS})).status_code == 401
    for key in ("sk-a", "sk-b"):
        assert (await post(router, "retain", {"prompt": TOKENS, "seconds": 1}, key)).status_code == 200
    assert [(one.block_hashes, one.tenant) for one in worker.hints] == [
        (names(TOKENS, '["research", ""]'), "tenant research"),
        (names(TOKENS), "key b"),
    ]


async def test_a_worker_that_fails_says_so_and_a_short_prompt_asks_nobody(
    router: RunningRouter, worker: FakeWorker
) -> None:
    worker.refuse = (grpc.StatusCode.UNAVAILABLE, "no")
    answer = await post(router, "evict", {"prompt": TOKENS})
    assert [one["error"] for one in answer.json()["workers"]] == ["UNAVAILABLE: no"]
    worker.refuse = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    answer = await post(router, "evict", {"prompt": TOKENS})
    assert [one["error"] for one in answer.json()["workers"]] == ["is of a version that takes no hints"]
    assert (await post(router, "evict", {"prompt": TOKENS[:15]})).json() == {
        "num_tokens": 0,
        "num_blocks": 0,
        "workers": [],
    }


BAD: list[tuple[str, dict[str, object], str]] = [
    ("retain", {"prompt": TOKENS}, "seconds"),
    ("retain", {"prompt": TOKENS, "seconds": -1}, "seconds"),
    ("retain", {"prompt": TOKENS, "seconds": 3601}, "seconds"),
    ("evict", {"prompt": TOKENS, "seconds": 1}, "seconds"),
    ("evict", {}, "messages"),
    ("prefetch", {}, "messages"),
    ("evict", {"prompt": "a", "messages": []}, "messages"),
    ("evict", {"prompt": [-1]}, "prompt"),
    ("evict", {"prompt": "a", "tools": []}, "tools"),
    ("evict", {"prompt": "a", "num_tokens": -1}, "num_tokens"),
    ("evict", {"prompt": "a", "cache_salt": "s" * 300}, "cache_salt"),
    ("evict", {"messages": []}, "messages"),
    ("evict", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
]


@each_case(("path", "body", "field"), BAD)
async def test_bad_bodies(
    router: RunningRouter, worker: FakeWorker, path: str, body: dict[str, object], field: str
) -> None:
    answer = await post(router, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert worker.hints == []


CHAT = [inference_pb2.ChatMessage(role="user", content="a")]
BAD_GRPC = [
    (inference_pb2.Prefix(), 1.0, "prefix.prompt"),
    (inference_pb2.Prefix(prompt="a", messages=CHAT), 1.0, "prefix.messages"),
    (inference_pb2.Prefix(prompt="a", tools=[inference_pb2.Tool(name="f")]), 1.0, "prefix.tools"),
    (inference_pb2.Prefix(prompt="a", num_tokens=-1), 1.0, "prefix.num_tokens"),
    (inference_pb2.Prefix(messages=CHAT, add_special_tokens=False), 1.0, "prefix.add_special_tokens"),
    (inference_pb2.Prefix(messages=[inference_pb2.ChatMessage(role="robot")]), 1.0, "prefix.messages[0].role"),
    (inference_pb2.Prefix(prompt="a"), float("nan"), "seconds"),
]


@each_case(("prefix", "seconds", "field"), BAD_GRPC)
async def test_bad_messages(
    router: RunningRouter, worker: FakeWorker, prefix: inference_pb2.Prefix, seconds: float, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.RetainPrefix(inference_pb2.RetainPrefixRequest(prefix=prefix, seconds=seconds))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == field
    assert worker.hints == []
