"""What browsers, proxies and probes ask of REST beside requests: CORS, HEAD, OPTIONS, a path of the proxy's."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from common.config import RouterSettings
from common.errors import ConfigError
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, sample
from tests.support.fake_worker import FakeWorker

SITE = "https://app.example.com"
OTHER = "https://evil.example.com"
BODY = {"prompt": "x", "max_tokens": 1}
KEY = "k" * 32
ASKED = "authorization,content-type,x-stainless-lang"


def cors_of(answer: httpx.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {name.removeprefix(prefix): value for name, value in answer.headers.items() if name.startswith(prefix)}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(KEY)
    return str(tmp_path / "keys")


async def test_a_page_asks_first_without_a_key(worker: FakeWorker, start_router: StartRouter, keys: str) -> None:
    """And without a place among the requests, all of which are taken here."""
    router = await start_router(worker, api_keys_file=keys, cors_origins=(SITE,), max_requests=1)
    refused = sample("baton_router_unauthenticated_total", interface="rest")
    async with httpx.AsyncClient(base_url=router.url) as client:
        for path in ("/v1/chat/completions", "/v1/nothing", "/health"):
            answer = await client.options(
                path,
                headers={
                    "Origin": SITE,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": ASKED,
                },
            )
            assert (answer.status_code, answer.content) == (204, b"")
            assert cors_of(answer) == {
                "allow-origin": SITE,
                "allow-methods": "GET, HEAD, POST",
                "allow-headers": ASKED,
                "max-age": "600",
            }
            assert "Origin" in answer.headers["vary"]
        denied = await client.options("/health", headers={"Origin": OTHER, "Access-Control-Request-Method": "GET"})
        assert (denied.status_code, cors_of(denied)) == (403, {})
        assert OTHER in denied.json()["error"]["message"]
        plain = await client.options("/v1/models", headers={"Origin": SITE})  # no preflight: a request as any
        assert plain.status_code == 401
    assert sample("baton_router_unauthenticated_total", interface="rest") == refused + 1


async def test_each_answer_says_who_may_see_it(worker: FakeWorker, start_router: StartRouter, keys: str) -> None:
    router = await start_router(worker, api_keys_file=keys, cors_origins=(SITE,))
    mine = {"Authorization": f"Bearer {KEY}", "Origin": SITE}
    async with httpx.AsyncClient(base_url=router.url, headers=mine) as client:
        answers = [
            await client.post("/v1/completions", json=BODY),
            await client.post("/v1/completions", json={**BODY, "stream": True}),
            await client.post("/v1/completions", json={**BODY, "max_tokens": "many"}),
            await client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer wrong"}),
            await client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}),
            await client.post(
                "/v1/completions", content=b"x" * 2_000_000, headers={"Content-Type": "application/json"}
            ),
            await client.get("/v1/nothing"),
            await client.put("/v1/models"),
            await client.get("/health"),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 415, 413, 404, 405, 200]
        said = {"allow-origin": SITE, "expose-headers": "X-Request-Id, Request-Id, Retry-After"}
        assert [cors_of(answer) for answer in answers] == [said] * len(answers)
        for origin in (OTHER, f"{SITE}.evil.com", "null", SITE.replace("https", "http")):
            answer = await client.get("/health", headers={"Origin": origin})
            assert (answer.status_code, cors_of(answer), answer.headers["vary"]) == (200, {}, "Origin")
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.get("/health")  # a cache may keep it for a page
        assert (cors_of(answer), answer.headers["vary"]) == ({}, "Origin")


async def test_all_sites_and_never_with_credentials(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, cors_origins=("*",))
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"Origin": OTHER})
        assert cors_of(answer) == {"allow-origin": "*", "expose-headers": "X-Request-Id, Request-Id, Retry-After"}
    with pytest.raises(ConfigError, match="cors_credentials"):
        await start_router(worker, cors_origins=(SITE, "*"), cors_credentials=True)
    with pytest.raises(ConfigError, match="cors_credentials"):
        await start_router(worker, cors_credentials=True)


async def test_credentials_of_named_sites(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, cors_origins=(SITE,), cors_credentials=True)
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.get("/health", headers={"Origin": SITE})
        assert (answer.headers["access-control-allow-credentials"], cors_of(answer)["allow-origin"]) == ("true", SITE)
        answer = await client.get("/health", headers={"Origin": OTHER})
        assert cors_of(answer) == {}


async def test_without_the_setting_nothing_is_said(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.get("/health", headers={"Origin": SITE})
        assert (cors_of(answer), "vary" in answer.headers) == ({}, False)
        asked = await client.options("/health", headers={"Origin": SITE, "Access-Control-Request-Method": "GET"})
        assert (asked.status_code, asked.headers["allow"], cors_of(asked)) == (405, "GET, HEAD", {})
        for path, allow in (("/v1/models", "GET, HEAD"), ("/v1/completions", "POST")):
            answer = await client.options(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allow)


@pytest.mark.parametrize(
    "value", ["https://a.example/", "a.example", "https://", "https://a b", "null", "https://*.a.example"]
)
def test_wrong_origins_are_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="scheme://host"):
        RouterSettings.model_validate({"cors_origins": value})


async def test_head_wherever_get_is(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        page = (await client.get("/openapi.json")).json()
        paths = [path for path, methods in page["paths"].items() if "get" in methods]
        assert not any("head" in methods for methods in page["paths"].values())
        assert {"/health", "/metrics", "/v1/models", "/v1/models/{model}"} <= set(paths)
        assert (await client.post("/v1/completions", json={**BODY, "request_id": "mine"})).status_code == 200
        for path in [*paths, "/openapi.json"]:
            asked = path.replace(":path", "").format(model="tiny", request_id="mine")
            got, head = await client.get(asked), await client.head(asked)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            if path not in ("/metrics", "/decisions"):
                assert head.headers["content-length"] == got.headers["content-length"]
        assert (await client.head("/v1/models/other")).status_code == 404
        assert (await client.head("/v1/nothing")).status_code == 404
        assert (await client.head("/v1/completions")).headers["allow"] == "POST"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_head_needs_the_keys_that_get_needs(worker: FakeWorker, start_router: StartRouter, keys: str) -> None:
    router = await start_router(worker, api_keys_file=keys)
    async with httpx.AsyncClient(base_url=router.url) as client:
        statuses = [(await client.head(path)).status_code for path in ("/health", "/ping", "/metrics", "/v1/models")]
    assert statuses == [200, 200, 200, 401]


@each_case("prefix", ["", "/llm/v2"])
async def test_a_path_of_a_proxy(worker: FakeWorker, start_router: StartRouter, keys: str, prefix: str) -> None:
    """One that strips it, and one that does not."""
    router = await start_router(worker, root_path="/llm/v2/", api_keys_file=keys)
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.get(f"{prefix}/health")).status_code == 200  # still without a key
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        client.headers["Authorization"] = f"Bearer {KEY}"
        assert (await client.post(f"{prefix}/v1/completions", json=BODY)).status_code == 200
        assert (await client.get(f"{prefix}/v1/models/tiny")).json()["id"] == "tiny"
        assert (await client.head(f"{prefix}/v1/models")).status_code == 200
        assert (await client.get(f"{prefix}/openapi.json")).json()["servers"] == [{"url": "/llm/v2"}]
        assert "<a href='openapi.json'>" in (await client.get(f"{prefix}/docs")).text
        moved = await client.post(f"{prefix}/tokenize/", json=BODY)
        assert (moved.status_code, moved.headers["location"]) == (307, f"{router.url}/llm/v2/tokenize")
        assert (await client.get("/llm/v2health")).status_code == 404


@pytest.mark.parametrize("value", ["llm", "/a b", "/a?b", "//a", "/a%20b", "http://x/llm"])
def test_wrong_paths_of_a_proxy_are_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="should be a path"):
        RouterSettings(root_path=value)
