"""The external metrics API: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import AutoscalerSettings
from common.errors import ConfigError, InvalidArgumentError, StartupError
from router.autoscaler import selector, tls
from router.autoscaler.aggregated import AggregatedApi
from router.autoscaler.board import METRIC_NAMES, Board
from router.autoscaler.external_metrics import ROOT, ExternalMetrics, quantity
from router.autoscaler.server import check
from tests.router.autoscaler.fakes import SIGNALS, Clock, make_ca, make_client, put

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def items(api: ExternalMetrics, name: str, query: str = "", namespace: str = "prod") -> list[tuple[str, str]]:
    code, body = api.answer("GET", f"{ROOT}/namespaces/{namespace}/{name}", query)
    assert code == 200
    assert body["kind"] == "ExternalMetricValueList"
    found = body["items"]
    assert isinstance(found, list)
    return [(one["metricLabels"].get("role"), one["value"]) for one in found]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    board = Board(clock)
    put(board)
    return board


@pytest.fixture
def api(board: Board) -> ExternalMetrics:
    return ExternalMetrics(board, "prod")


def test_every_metric_is_listed_and_served(api: ExternalMetrics) -> None:
    code, body = api.answer("GET", ROOT, "")
    assert code == 200
    assert [one["name"] for one in body["resources"]] == list(METRIC_NAMES)  # type: ignore[attr-defined]
    for name in METRIC_NAMES:
        assert items(api, name), name


def test_values(api: ExternalMetrics) -> None:
    assert items(api, "baton_prefill_queued_tokens") == [("prefill", "4000")]
    assert items(api, "baton_prefill_queued_tokens_per_pod") == [("prefill", "2000")]
    assert items(api, "baton_prefill_arrival_tokens_per_second") == [("prefill", "123457m")]
    assert items(api, "baton_decode_kv_usage") == [("decode", "375m")]
    assert items(api, "baton_decode_kv_used_pods") == [("decode", "1500m")]
    assert items(api, "baton_decode_requests") == [("decode", "30")]
    assert items(api, "baton_desired_replicas") == [("prefill", "3"), ("decode", "5")]
    assert items(api, "baton_desired_replicas", "labelSelector=role%3Ddecode") == [("decode", "5")]
    assert items(api, "baton_desired_replicas", namespace="elsewhere") == []


@pytest.mark.parametrize("escape", [str, quote, lambda path: quote(path, safe="")])
def test_paths_may_be_escaped(api: ExternalMetrics, escape: object) -> None:
    path = escape(f"{ROOT}/namespaces/prod/baton_decode_requests")  # type: ignore[operator]
    assert api.answer("GET", path, "")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "query", "code"),
    [
        ("GET", "/", "", 404),
        ("GET", "/apis/external.metrics.k8s.io", "", 404),
        ("GET", ROOT + "/namespaces/prod/nothing", "", 404),
        ("GET", ROOT + "/namespaces/prod", "", 404),
        ("GET", ROOT + "/nodes/prod/baton_decode_requests", "", 404),
        ("POST", ROOT, "", 405),
        ("GET", ROOT + "/namespaces/prod/baton_decode_requests", "labelSelector=%3D%3D", 400),
    ],
)
def test_what_is_not_there(api: ExternalMetrics, method: str, path: str, query: str, code: int) -> None:
    got, body = api.answer(method, path, query)
    assert (got, body["kind"], body["code"]) == (code, "Status", code)


def test_old_values_are_not_served(api: ExternalMetrics, board: Board, clock: Clock) -> None:
    path = f"{ROOT}/namespaces/prod/baton_decode_requests"
    clock.now += 1.9
    assert api.answer("GET", path, "")[0] == 200
    clock.now += 0.2
    code, body = api.answer("GET", path, "")
    assert (code, body["message"]) == (503, "the fleet was last read 2.1 s ago")
    put(board)
    assert api.answer("GET", path, "")[0] == 200
    assert ExternalMetrics(Board(clock), "prod").answer("GET", path, "")[0] == 503
    assert api.answer("GET", ROOT, "")[0] == 200  # the API itself stays available


@given(st.floats(0, 1e12, allow_nan=False))
def test_quantities_are_read_back_within_a_thousandth(value: float) -> None:
    text = quantity(value)
    read = int(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    assert value - 1e-3 <= read + 1e-6 * value
    assert read <= value + 1.001e-3 + 1e-6 * value


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True), ("role=decode", True), ("role==decode", True), ("role!=decode", False), ("role=prefill", False),
        ("role in (prefill, decode)", True), ("role notin (prefill,x)", True), ("role in (prefill),role", False),
        ("role", True), ("!role", False), ("!team", True), ("team=", False), ("team!=a,role=decode", True),
        ("app.kubernetes.io/name!=x", True),
    ],
)  # fmt: skip
def test_selectors(text: str, holds: bool) -> None:
    assert all(one.holds({"role": "decode"}) for one in selector.parse(text)) is holds


@pytest.mark.parametrize("text", ["=", "a=b=c", "a in b", "a in (b", ",", "a=b,", "a b"])
def test_selectors_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="labelSelector"):
        selector.parse(text)


# ---------------------------------------------------------------------------------------------- TLS


def test_a_bundle_keeps_the_youngest_and_grows_no_further() -> None:
    pytest.importorskip("cryptography", reason="the extra `kubernetes` is not installed")
    certificates = [tls.make_certificate("svc", "prod")[0] for _ in range(tls.BUNDLE_LIMIT + 2)]
    bundle = b""
    for certificate in certificates:
        bundle = tls.merged_bundle(bundle, certificate)
        assert tls.merged_bundle(bundle, certificate) == bundle
    assert bundle.count(b"BEGIN CERTIFICATE") == tls.BUNDLE_LIMIT
    assert certificates[-1] in bundle
    assert tls.merged_bundle(b"no certificate", certificates[0]) == certificates[0]


@asynccontextmanager
async def serving(api: AggregatedApi) -> AsyncIterator[int]:
    task = asyncio.create_task(api.run())
    try:
        yield int(api.address.rpartition(":")[2])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


async def get(
    port: int, path: str, context: ssl.SSLContext, name: str = "svc.prod.svc"
) -> tuple[int, dict[str, object]]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError("no answer")
    return int(head.split()[1]), json.loads(body)


@needs_openssl
async def test_only_the_front_proxy_gets_in(tmp_path: Path, board: Board) -> None:
    pytest.importorskip("cryptography", reason="the extra `kubernetes` is not installed")
    make_ca(tmp_path, "front")
    make_ca(tmp_path, "other")
    certificate, key = tls.make_certificate("svc", "prod")
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    settings = AutoscalerSettings(
        external_metrics_listen="127.0.0.1:0",
        namespace="prod",
        external_metrics_cert=str(tmp_path / "tls.crt"),
        external_metrics_key=str(tmp_path / "tls.key"),
        front_proxy_ca=str(tmp_path / "front.crt"),
        front_proxy_names=("aggregator",),
    )

    def context(client: tuple[Path, Path] | None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        if client:
            made.load_cert_chain(*client)
        return made

    board = Board()  # of the real clock
    put(board)
    async with serving(AggregatedApi(settings, board, None)) as port:
        right = make_client(tmp_path, "front", "aggregator")
        code, body = await get(port, ROOT, context(right))
        assert (code, body["kind"]) == (200, "APIResourceList")
        put(board)
        code, body = await get(port, f"{ROOT}/namespaces/prod/baton_decode_requests", context(right))
        assert (code, body["items"][0]["value"]) == (200, str(SIGNALS.decode.num_requests))  # type: ignore[index]

        for wrong in (None, make_client(tmp_path, "other", "aggregator"), make_client(tmp_path, "front", "somebody")):
            with pytest.raises((ssl.SSLError, OSError)):
                await get(port, ROOT, context(wrong))
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(port, ROOT, context(right), name="elsewhere.prod.svc")


def test_settings_that_do_not_go_together() -> None:
    def refused(match: str, **settings: object) -> None:
        with pytest.raises(ConfigError, match=match):
            check(AutoscalerSettings.model_validate(settings))

    refused("prefill_min", prefill_min=5, prefill_max=4)
    refused("external_metrics_key", external_metrics_cert="a")
    refused("external_metrics_service", external_metrics_listen="127.0.0.1:0")
    refused("external_metrics_service", external_metrics_listen="127.0.0.1:0", external_metrics_service="name")
    refused("decode_workload", apply=True, prefill_workload="deployment/a")
    refused("prefill_workload", apply=True, prefill_workload="pod/a", decode_workload="deployment/b")


async def test_certificates_that_cannot_be_read_say_so(tmp_path: Path, board: Board) -> None:
    settings = AutoscalerSettings(
        external_metrics_listen="127.0.0.1:0",
        namespace="prod",
        external_metrics_cert=str(tmp_path / "missing"),
        external_metrics_key=str(tmp_path / "missing"),
        front_proxy_ca=str(tmp_path / "missing"),
    )
    api = AggregatedApi(settings, board, None)
    with pytest.raises(StartupError, match="serving certificate"):
        await api.run()
    await api.close()
