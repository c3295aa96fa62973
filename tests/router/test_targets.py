"""Latency targets: where a request has them from, who hears of them, and what is told of what became of them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton import LLM, AsyncClient, Client, LatencyTargets
from baton.client.report import SloReport
from baton.timeline import render_stages, render_timeline
from common.errors import InvalidArgumentError, StartupError
from protos.baton.v1 import inference_pb2, types_pb2
from router.limits.clients import call_hints
from router.limits.quotas import Quotas
from router.limits.targets import CLASS_HEADER, TPOT_HEADER, TTFT_HEADER, GivenTargets, Slo
from router.running.request import Progress
from router.running.slo import exceeds, note_outcome
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, sample
from tests.router.test_answer import requests
from tests.router.test_beams import scores
from tests.router.test_grpc import violated_field
from tests.support.fake_worker import FakeWorker

LIMITS = """
slo_classes:
  chat: {ttft_ms: 500, tpot_ms: 50}
  first: {ttft_ms: 200}
  batch: {}
  slow: {ttft_ms: 3600000, tpot_ms: 3600000}
default: {slo: {ttft_ms: 9000, tpot_ms: 900}}
keys:
  ann: {slo: {ttft_ms: 300}}
  bob: {slo_class: first}
tenants:
  lab: {slo_class: chat}
"""
SOON, LATE = 0.001, 3_600_000.0  # milliseconds: nothing is as soon, and everything sooner than that
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.yaml"
    path.write_text(LIMITS)
    return path


def body(ttft_ms: float | None = None, tpot_ms: float | None = None, slo_class: str = "") -> GivenTargets:
    return GivenTargets(ttft_ms=ttft_ms, tpot_ms=tpot_ms, slo_class=slo_class)


@pytest.mark.parametrize(
    ("key", "tenant", "asked", "expected"),
    [
        ("", "", [], (9000, 900, "")),
        ("ann", "", [], (300, 900, "")),  # each number for itself
        ("ann", "lab", [], (300, 50, "chat")),
        ("bob", "lab", [], (200, None, "first")),  # a class is meant as a whole
        ("eve", "lab", [], (500, 50, "chat")),
        ("eve", "lab", [body(slo_class="batch")], (None, None, "batch")),
        ("eve", "lab", [body(tpot_ms=7)], (500, 7, "chat")),
        ("eve", "", [body(tpot_ms=7), body(1, 2, "first")], (1, 7, "first")),
        ("eve", "", [body(), body(3, None, "")], (3, 900, "")),
        ("eve", "", [body(slo_class="chat"), body(1, 1, "first")], (500, 50, "chat")),
    ],
)
def test_where_targets_come_from(
    path: Path, key: str, tenant: str, asked: list[GivenTargets], expected: tuple[float | None, float | None, str]
) -> None:
    slo = Quotas(str(path)).slo(key, tenant, *asked)
    targets = slo.targets or LatencyTargets()
    assert (targets.ttft_ms, targets.tpot_ms, slo.slo_class) == expected


def test_the_settings_have_the_last_word(path: Path) -> None:
    path.write_text("keys: {ann: {slo: {ttft_ms: 5}}}")
    quotas = Quotas(str(path), targets=body(10, 20))
    assert quotas.slo("ann", "").targets == LatencyTargets(5, 20)
    assert Quotas(targets=body(10)).slo("ann", "").targets == LatencyTargets(10)
    assert Quotas().slo("ann", "").targets is None


def test_a_class_that_there_is_not(path: Path) -> None:
    headers = call_hints({CLASS_HEADER: "gold"}).targets
    with pytest.raises(
        InvalidArgumentError, match=r"no class 'fast': the classes are batch, chat, first, slow"
    ) as caught:
        Quotas(str(path)).slo("", "", body(slo_class="fast"), headers)
    assert caught.value.field == "slo_class"
    with pytest.raises(InvalidArgumentError, match="there are none") as caught:
        Quotas().slo("", "", body(), headers)
    assert caught.value.field == CLASS_HEADER


LEAST = """
slo_classes: {fast: {ttft_ms: 100, tpot_ms: 20}, batch: {}}
default: {slo: {ttft_ms: 5}, slo_least: {ttft_ms: 400, tpot_ms: 10}}
keys: {ann: {slo_least: {ttft_ms: 50}}}
tenants: {lab: {slo_least: {ttft_ms: 200, tpot_ms: 30}}}
"""


@pytest.mark.parametrize(
    ("key", "tenant", "asked", "field"),
    [
        ("", "", [], ""),  # what the file gives is the operator's own word
        ("", "", [body(400, 10)], ""),
        ("", "", [body(399)], "slo.ttft_ms"),
        ("", "", [body(tpot_ms=9.5)], "slo.tpot_ms"),
        ("", "", [body(slo_class="fast")], "slo_class"),
        ("", "", [body(500, None, "fast")], ""),  # its own number goes before that of the class
        ("", "", [body(), call_hints({TTFT_HEADER: "399"}).targets], TTFT_HEADER),
        ("", "", [body(), call_hints({TPOT_HEADER: "9", TTFT_HEADER: "400"}).targets], TPOT_HEADER),
        ("", "", [body(), call_hints({CLASS_HEADER: "fast"}).targets], CLASS_HEADER),
        ("", "", [body(500), call_hints({TTFT_HEADER: "1"}).targets], ""),  # which nobody hears of
        ("", "", [body(slo_class="batch"), call_hints({TTFT_HEADER: "1"}).targets], ""),  # likewise
        ("ann", "lab", [body(50, 30)], ""),  # each number of the first that has it: key, tenant, default
        ("ann", "lab", [body(49, 30)], "slo.ttft_ms"),
        ("ann", "lab", [body(50, 29)], "slo.tpot_ms"),
        ("ann", "", [body(50, 10)], ""),
        ("eve", "lab", [body(199)], "slo.ttft_ms"),
    ],
)
def test_targets_that_are_tighter_than_a_client_may_ask_for(
    path: Path, key: str, tenant: str, asked: list[GivenTargets], field: str
) -> None:
    path.write_text(LEAST)
    quotas = Quotas(str(path))
    if not field:
        quotas.slo(key, tenant, *asked)
        return
    with pytest.raises(InvalidArgumentError, match=r"t[tp][fo]t_ms must be at least \d+ for this client") as caught:
        quotas.slo(key, tenant, *asked)
    assert caught.value.field == field


@pytest.fixture
def tight_path(path: Path) -> Path:
    path.write_text(LEAST)
    return path


async def test_too_tight_targets_are_told_over_both_interfaces(
    worker: FakeWorker, start_router: StartRouter, tight_path: Path
) -> None:
    router = await start_router(worker, limits_file=str(tight_path))
    async with httpx.AsyncClient(base_url=f"{router.url}/v1") as client:
        answer = await client.post("chat/completions", json={**CHAT, "slo": {"ttft_ms": 399}})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "slo.ttft_ms"
        assert "must be at least 400 for this client, not 399" in answer.json()["error"]["message"]
    request = inference_pb2.GenerateRequest(prompt="Hi", slo=types_pb2.LatencyTargets(tpot_ms=9))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [one async for one in router.inference.Generate(request)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == "slo.tpot_ms"
    assert not worker.requests


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: {ann: {slo_least: {ttft_ms: -1}}}", r"keys\.ann\.slo_least\.ttft_ms"),
        ("default: {slo_class: fast}", r"default\.slo_class: there is no class 'fast'"),
        ("keys: {ann: {slo_class: fast}}", r"keys\.ann\.slo_class: there is no class 'fast'"),
        ("tenants: {lab: {slo: {ttft_ms: 0}}}", r"tenants\.lab\.slo\.ttft_ms"),
        ("slo_classes: {chat: {tpot_ms: .inf}}", r"slo_classes\.chat\.tpot_ms"),
        ("slo_classes: {chat: {e2e_ms: 1}}", r"slo_classes\.chat\.e2e_ms"),
        ("slo_classes: {none: {tpot_ms: 1}}", r"slo_classes: 'none' is no name"),
    ],
)
def test_a_limits_file_that_is_wrong(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(StartupError, match=words):
        Quotas(str(path))


# ------------------------------------------------------------------------------------------------ asking


def told(worker: FakeWorker) -> list[tuple[float | None, float | None]]:
    """The targets that the worker heard since the last call."""
    found = [
        (
            one.targets.ttft_ms if one.targets.HasField("ttft_ms") else None,
            one.targets.tpot_ms if one.targets.HasField("tpot_ms") else None,
        )
        for one in worker.requests
    ]
    worker.requests.clear()
    return found


async def test_over_rest(worker: FakeWorker, start_router: StartRouter, path: Path) -> None:
    router = await start_router(worker, limits_file=str(path))
    paths = {"chat/completions": CHAT, "completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}
    async with httpx.AsyncClient(base_url=f"{router.url}/v1") as client:
        for name, asked in paths.items():
            for given, headers, expected in (
                ({}, {}, (9000, 900)),
                ({"slo": {"ttft_ms": 300}}, {}, (300, 900)),
                ({"slo": {"ttft_ms": 300}, "slo_class": "chat"}, {TPOT_HEADER: "60"}, (300, 50)),
                ({"slo": {"ttft_ms": 300}}, {TPOT_HEADER: "60.5", TTFT_HEADER: "1"}, (300, 60.5)),
                ({"slo": None, "slo_class": None}, {CLASS_HEADER: "chat", TTFT_HEADER: ""}, (500, 50)),
            ):
                answer = await client.post(name, json={**asked, **given}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert told(worker) == [expected]


@each_case(
    ("given", "headers", "field"),
    [
        ({"slo": {}}, {}, "slo"),
        ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": 5, "tpot_ms": -1}}, {}, "slo.tpot_ms"),
        ({"slo": {"tpot_ms": 1e12}}, {}, "slo.tpot_ms"),
        ({"slo": {"tpot_ms": "5"}}, {}, "slo.tpot_ms"),
        ({"slo": {"e2e_ms": 5}}, {}, "slo.e2e_ms"),
        ({"slo_class": "gold"}, {}, "slo_class"),
        ({}, {TTFT_HEADER: "soon"}, TTFT_HEADER),
        ({}, {TTFT_HEADER: "nan"}, TTFT_HEADER),
        ({}, {TPOT_HEADER: "-3"}, TPOT_HEADER),
        ({"slo": {"ttft_ms": 5}}, {CLASS_HEADER: "gold"}, CLASS_HEADER),
    ],
)
async def test_what_is_wrong_over_rest(
    router: RunningRouter, given: dict[str, Any], headers: dict[str, str], field: str
) -> None:
    async with httpx.AsyncClient(base_url=f"{router.url}/v1") as client:
        answer = await client.post("completions", json={"prompt": "a", **given}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert field in answer.json()["error"]["message"]


async def test_over_grpc(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, slo_ttft_ms=800)
    slo = types_pb2.LatencyTargets(ttft_ms=300, tpot_ms=30)
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Hi")], slo=slo)
    assert [one async for one in router.inference.Chat(chat)]
    generate = inference_pb2.GenerateRequest(prompt="Hi", slo=types_pb2.LatencyTargets(tpot_ms=5))
    metadata = ((TTFT_HEADER, "7"), (TPOT_HEADER, "8"))
    assert [one async for one in router.inference.Generate(generate, metadata=metadata)]
    assert [one async for one in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hi"))]
    assert told(worker) == [(300, 30), (7, 5), (800, None)]
    for wrong, field in (
        ({"slo": types_pb2.LatencyTargets()}, "slo"),
        ({"slo": types_pb2.LatencyTargets(ttft_ms=float("nan"))}, "slo.ttft_ms"),
        ({"slo_class": "gold"}, "slo_class"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [one async for one in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hi", **wrong))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violated_field(caught.value) == field


async def test_from_python(worker: FakeWorker, start_router: StartRouter, path: Path) -> None:
    router, slo = await start_router(worker, limits_file=str(path)), LatencyTargets(ttft_ms=77)

    def ask() -> None:
        with Client(router.grpc_address) as client:
            report = client.generate("Hi", slo=slo, slo_class="chat").result().report
            assert report.slo is not None
            assert (report.slo.slo_class, report.slo.targets) == ("chat", LatencyTargets(77, 50))
            client.chat("Hi", slo=slo, slo_class="batch").result()
            with pytest.raises(InvalidArgumentError, match=r"slo\.ttft_ms"):
                client.generate("Hi", slo=LatencyTargets(ttft_ms=-1))
        with LLM(target=router.grpc_address) as llm:
            llm.generate("Hi", use_tqdm=False, slo=slo, slo_class="first")
            llm.chat("Hi", use_tqdm=False, slo=[slo])
            with pytest.raises(InvalidArgumentError, match="slo: must be one for each of 1 prompts"):
                llm.generate("Hi", use_tqdm=False, slo=[slo, None])

    await asyncio.to_thread(ask)
    async with AsyncClient(router.grpc_address) as client:
        await client.generate("Hi", slo_class="chat").result()
    assert told(worker) == [(77, 50), (77, None), (77, None), (77, 900), (500, 50)]


@pytest.mark.parametrize("die_after", [0, 3])
async def test_the_next_worker_hears_of_them_too(
    start_worker: StartWorker, start_router: StartRouter, die_after: int
) -> None:
    """After one that was lost before its first token, and after one that was lost later."""
    workers = [await start_worker(), await start_worker()]
    workers[0].die_after = die_after
    router = await start_router(*workers)
    for name in "ab":  # whichever is asked first
        asked = {"slo": {"ttft_ms": 400}, "request_id": name}
        await router.openai.completions.create(model="tiny", prompt="Hi", extra_body=asked)
    heard = [one for each in workers for one in each.requests]
    assert [one.targets.ttft_ms for one in heard] == [400] * 3
    (lost,) = workers[0].requests
    (later,) = (one for one in workers[1].requests if one.request_id == lost.request_id)
    assert 0 < lost.age_ms < later.age_ms
    assert len(later.output_token_ids) == die_after


# ------------------------------------------------------------------------------------- what became of them


@pytest.mark.parametrize(
    ("progress", "status", "now", "expected"),
    [
        (Progress(first_token_at=0.2, last_token_at=1.2, num_output_tokens=11), "ok", 1.2, (True, True, 100)),
        (Progress(first_token_at=0.4, last_token_at=1.5, num_output_tokens=11), "ok", 1.5, (False, False, 110)),
        (Progress(first_token_at=0.2, last_token_at=0.2, num_output_tokens=1), "ok", 0.2, (True, None, None)),
        (Progress(), "unavailable", 0.1, (False, False, None)),
        (Progress(), "invalid_argument", 0.1, (None, None, None)),
        (Progress(), "cancelled", 0.1, (None, None, None)),
        (Progress(), "aborted", 0.1, (None, None, None)),
        (Progress(), "cancelled", 0.4, (False, None, None)),
        (Progress(first_token_at=0.2, last_token_at=0.3, num_output_tokens=2), "cancelled", 9, (True, True, 100)),
        (Progress(first_token_at=0.2, last_token_at=0.3, num_output_tokens=2), "aborted", 9, (True, True, 100)),
        (Progress(first_token_at=0.2, last_token_at=0.3, num_output_tokens=2), "unavailable", 9, (True, False, 100)),
    ],
)
def test_outcomes(
    progress: Progress, status: str, now: float, expected: tuple[bool | None, bool | None, float | None]
) -> None:
    (request,) = requests(1)
    note_outcome(request, progress, status, now)
    assert not progress.report.HasField("slo"), "it has no targets"
    request = replace(request, slo=Slo(LatencyTargets(300, 100.001)))
    note_outcome(request, progress, status, now)
    slo = progress.report.slo
    met = [getattr(slo, name) if slo.HasField(name) else None for name in ("ttft_met", "tpot_met")]
    assert (*met, pytest.approx(slo.tpot_ms) if slo.HasField("tpot_ms") else None) == expected


@pytest.mark.parametrize(
    ("progress", "now", "factor", "is_slow"),
    [
        (Progress(first_token_at=0.3, last_token_at=1.3, num_output_tokens=11), 1.3, 1.0, False),
        (Progress(first_token_at=0.5, last_token_at=1.5, num_output_tokens=11), 1.5, 2.0, False),
        (Progress(first_token_at=0.7, last_token_at=1.7, num_output_tokens=11), 1.7, 2.0, True),
        (Progress(first_token_at=0.2, last_token_at=2.5, num_output_tokens=11), 2.5, 2.0, True),
        (Progress(first_token_at=0.2, last_token_at=0.2, num_output_tokens=1), 9.0, 2.0, False),
        (Progress(), 0.5, 2.0, False),
        (Progress(), 0.7, 2.0, True),
    ],
)
def test_a_request_is_slow_by_its_own_targets(progress: Progress, now: float, factor: float, *, is_slow: bool) -> None:
    (plain,) = requests(1)
    assert not exceeds(plain, progress, factor, now)
    request = replace(plain, arrived_at=0.0, slo=Slo(LatencyTargets(300, 100.001)))
    assert exceeds(request, progress, factor, now) == is_slow
    only_first = replace(plain, arrived_at=0.0, slo=Slo(LatencyTargets(ttft_ms=300)))
    assert exceeds(only_first, progress, 100.0, now) is False


async def test_what_is_told(
    worker: FakeWorker, start_router: StartRouter, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(worker, limits_file=str(path), slow_target_factor=1.0)
    met = {"class": "slow", "ttft": "met", "tpot": "met"}
    missed = {"class": "slow", "ttft": "missed", "tpot": "met"}
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(base_url=router.url) as client:

            async def ask(**given: object) -> dict[str, Any]:
                asked = {**CHAT, "include_metrics": True, "request_id": "x", **given}
                return dict((await client.post("/v1/chat/completions", json=asked)).json())

            good, late = await ask(slo_class="slow"), await ask(slo_class="slow", slo={"ttft_ms": SOON})
            empty = await ask(slo_class="batch")
            ended = (await client.get("/requests?limit=3")).json()["requests"]
    num_tokens = good["usage"]["completion_tokens"]
    assert sample("baton_router_slo_requests_total", **met) == 1
    assert sample("baton_router_slo_requests_total", **missed) == 1
    assert sample("baton_router_slo_requests_total", **{"class": "batch", "ttft": "none", "tpot": "none"}) == 1
    assert sample("baton_router_goodput_requests_total", **{"class": "slow"}) == 1
    assert sample("baton_router_goodput_tokens_total", **{"class": "slow"}) == num_tokens

    slo = good["baton"]["slo"]
    assert (slo["slo_class"], slo["targets"]) == ("slow", {"ttft_ms": LATE, "tpot_ms": LATE})
    assert (slo["ttft_met"], slo["tpot_met"]) == (True, True)
    assert slo["tpot_ms"] == pytest.approx(good["metrics"]["mean_itl_ms"], abs=0.01)
    assert late["baton"]["slo"]["ttft_met"] is False
    assert late["baton"]["slo"]["targets"] == {"ttft_ms": SOON, "tpot_ms": LATE}
    assert empty["baton"]["slo"] == {
        "slo_class": "batch", "targets": None, "tpot_ms": empty["baton"]["slo"]["tpot_ms"], "ttft_met": None,
        "tpot_met": None,
    }  # fmt: skip
    of_metrics = ("slo_class", "ttft_met", "tpot_met")
    assert [late["metrics"][name] for name in of_metrics] == ["slow", False, True]
    assert [empty["metrics"][name] for name in of_metrics] == ["batch", None, None]

    facts = ("slo_class", "ttft_target_ms", "tpot_target_ms", "ttft_met", "tpot_met")
    assert [[one[name] for name in facts] for one in ended] == [
        ["batch", None, None, None, None],
        ["slow", SOON, LATE, False, True],
        ["slow", LATE, LATE, True, True],
    ]
    lines = [vars(record) for record in caplog.records if record.message in ("answered", "slow request")]
    assert ["timeline" in line for line in lines] == [False, True, False]
    assert (lines[1]["slo_class"], lines[1]["ttft_target"], lines[1]["tpot_target"]) == ("slow", "missed", "met")
    assert (lines[2]["slo_class"], "ttft_target" in lines[2]) == ("batch", False)

    def pictures() -> tuple[str, str]:
        with Client(router.grpc_address) as one:
            answer = one.generate("Hi", slo=LatencyTargets(ttft_ms=SOON, tpot_ms=LATE), request_id="pic").result()
            assert answer.report.slo is not None
            assert answer.report.slo == SloReport(
                targets=LatencyTargets(SOON, LATE), tpot_ms=answer.report.slo.tpot_ms,
                ttft_met=False, tpot_met=True,
            )  # fmt: skip
            return render_timeline(answer.report, answer.usage), render_stages(one.requests(request_id="pic")[0])

    for picture in await asyncio.to_thread(pictures):
        assert "latency targets: first token within 0.0 ms: missed, 3600.0 s a token: met (" in " ".join(
            picture.split()
        )


async def test_nothing_is_told_without_targets(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "Hi", "include_metrics": True})).json()
        (ended,) = (await client.get("/requests")).json()["requests"]
    assert answer["baton"]["slo"] is None
    assert [answer["metrics"][name] for name in ("slo_class", "ttft_met", "tpot_met")] == [None, None, None]
    assert (ended["slo_class"], ended["ttft_target_ms"], ended["ttft_met"]) == ("", None, None)


async def test_a_beam_search_has_targets_for_each_step(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.scores = scores
    router = await start_router(worker)
    asked = {"prompt": [5, 6], "use_beam_search": True, "n": 2, "max_tokens": 2, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json={**asked, "slo": {"ttft_ms": 90, "tpot_ms": 9}})
    assert answer.status_code == 200, answer.text
    heard = [
        (len(one.prompt_token_ids), *targets, one.is_follow_up)
        for one, targets in zip([*worker.requests], told(worker), strict=True)
    ]
    assert sorted(heard) == [(2, 90, 9, False), (3, 9, None, True), (3, 9, None, True)]
