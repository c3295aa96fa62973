"""A body is JSON by its type, or says nothing of it: a page of any other site may send further types without asking."""

from __future__ import annotations

import httpx

from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.support.fake_worker import FakeWorker

BODIES: dict[str, str] = {
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
    "/v1/completions": '{"prompt": "x", "max_tokens": 1}',
    "/v1/responses": '{"input": "x"}',
    "/v1/messages": '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
    "/v1/messages/count_tokens": '{"messages": [{"role": "user", "content": "x"}]}',
    "/v1/embeddings": '{"input": "x"}',
    "/v1/cache/retain": '{"prompt": "x", "seconds": 1}',
    "/v1/cache/evict": '{"prompt": "x"}',
    "/v1/cache/prefetch": '{"prompt": "x"}',
    "/tokenize": '{"prompt": "x"}',
    "/detokenize": '{"tokens": [1]}',
}
ORIGIN = {"Origin": "https://evil.example"}
TAKEN = [
    {},
    {"Content-Type": ""},
    {"Content-Type": "application/json"},
    {"Content-Type": "application/json; charset=utf-8"},
    {"Content-Type": "Application/JSON;charset=UTF-8"},
    {"Content-Type": "application/vnd.api+json"},
    {"Content-Type": "application/json", "Content-Encoding": "identity"},
    {"Content-Type": "application/json", **ORIGIN},
]
REFUSED = [
    {"Content-Type": "text/plain"},
    {"Content-Type": "text/plain;application/json"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": "text/json"},
    {"Content-Type": "application/jsonp"},
    {"Content-Type": "application/+json"},
    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ORIGIN,  # a page's Blob without a type is sent without one
    {"Content-Type": "", **ORIGIN},
]


async def test_every_path_refuses_other_types(router: RunningRouter, worker: FakeWorker) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        page = (await client.get("/openapi.json")).json()
        assert {path for path, methods in page["paths"].items() if "post" in methods} == set(BODIES)
        assert all(set(methods) <= {"get", "post"} for methods in page["paths"].values())
        for path, body in BODIES.items():
            answer = await client.post(path, content=body, headers={"Content-Type": "text/plain"})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (415, "invalid_request_error"), path
            assert error["message"] == "the body must be application/json, not 'text/plain'"
    assert not worker.requests


@each_case("headers", REFUSED)
async def test_refused(router: RunningRouter, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", content=BODIES["/v1/completions"], headers=headers)
    assert answer.status_code == 415


@each_case("headers", TAKEN)
async def test_taken(router: RunningRouter, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", content=BODIES["/v1/completions"], headers=headers)
    assert answer.status_code == 200


async def test_one_of_several_types_decides_nothing(router: RunningRouter) -> None:
    headers = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", content=BODIES["/v1/completions"], headers=headers)
    assert answer.status_code == 415
