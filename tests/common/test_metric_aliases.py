"""Values of a page under vLLM's names: all of them are made of metrics that there are, and mean what they say."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common import metric_aliases, metrics
from common.metric_aliases import ROUTER, WORKER, AnyAlias, CacheFacts, Distribution, Values, with_aliases
from common.metric_page import render

FACTS = CacheFacts(model="m", block_size=16, num_blocks=100, num_used_blocks=25)
OWN = {"model_name": "m", "engine": "0"}
OF_VLLM = {  # the families of vLLM 0.33 that have an alias (vllm/v1/metrics/loggers.py), with their types there
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
}


def made(aliases: Iterable[AnyAlias], *families: Metric) -> dict[str, Metric]:
    found = with_aliases(families, aliases, lambda: FACTS)
    return {one.name: one for one in found if one.name.startswith("vllm:")}


def family(name: str, kind: str, *samples: Sample) -> Metric:
    found = Metric(name, "about", kind)
    found.samples = list(samples)
    return found


def test_names_and_types_are_vllm_s() -> None:
    for aliases in (ROUTER, WORKER):
        for name, found in made(aliases).items():
            of_vllm = OF_VLLM[name]
            assert found.type == of_vllm or (found.type, of_vllm) == ("summary", "histogram"), name
    assert made(ROUTER).keys() | made(WORKER).keys() == OF_VLLM.keys()


def test_aliases_are_made_of_metrics_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    class Asked(Values):
        def of(self, name: str) -> list[Sample]:
            asked.add(name)
            return super().of(name)

        def total(self, name: str, **labels: str) -> float:
            asked.add(name)
            return super().total(name, **labels)

        def by(self, name: str, label: str) -> dict[str, float]:
            asked.add(name)
            return super().by(name, label)

    monkeypatch.setattr(metric_aliases, "Values", Asked)
    made((*ROUTER, *WORKER), *REGISTRY.collect())
    suffixes: dict[type, tuple[str, ...]] = {
        Counter: ("_total",),
        Gauge: ("",),
        Histogram: ("_bucket", "_sum", "_count"),
    }
    declared = {
        one._name + suffix
        for one in vars(metrics).values()
        if isinstance(one, Counter | Gauge | Histogram)
        for suffix in suffixes[type(one)]
    }
    assert asked
    assert asked <= declared


@pytest.mark.parametrize("alias", [one for one in (*ROUTER, *WORKER) if isinstance(one, Distribution) and one.bounds])
def test_bounds_of_vllm_are_among_baton_s(alias: Distribution) -> None:
    (own,) = [one for one in vars(metrics).values() if isinstance(one, Histogram) and one._name == alias.source]
    assert alias.bounds is not None
    assert {*alias.bounds} <= {*own._upper_bounds}


# Of OpenTelemetry's conventions: docs/gen-ai/gen-ai-metrics.md.
POWERS_OF_2 = tuple(round(0.01 * 2**n, 2) for n in range(14))
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKENS = tuple(float(4**n) for n in range(9))


@pytest.mark.parametrize(
    ("own", "bounds"),
    [
        (metrics.router_ttft, FIRST),
        (metrics.router_tpot, PER_TOKEN),
        (metrics.router_e2e, POWERS_OF_2),
        (metrics.router_prompt_tokens, TOKENS),
        (metrics.router_output_tokens, TOKENS),
    ],
)
def test_bounds_of_the_conventions_are_among_baton_s(own: Histogram, bounds: tuple[float, ...]) -> None:
    assert {*bounds} <= {*own._upper_bounds}


def test_a_router_s_values() -> None:
    found = made(
        ROUTER,
        family("baton_router_requests_running", "gauge", Sample("baton_router_requests_running", {}, 9)),
        family("baton_router_requests_queued", "gauge", Sample("baton_router_requests_queued", {}, 2)),
        family(
            "baton_router_answers",
            "counter",
            *[
                Sample("baton_router_answers_total", {"reason": reason}, number)
                for reason, number in (
                    ("stop", 4), ("tool_calls", 1), ("length", 3), ("cancelled", 2), ("deadline_exceeded", 1),
                    ("unavailable", 5), ("internal", 1),
                )
            ],
        ),
        family(
            "baton_router_stage_seconds",
            "counter",
            *[
                Sample("baton_router_stage_seconds_total", {"stage": stage}, seconds)
                for stage, seconds in (("router_queue", 1.0), ("queue", 2.0), ("prefill", 4.0), ("decode", 8.0))
            ],
        ),
        family("baton_router_request_seconds", "histogram", Sample("baton_router_request_seconds_count", {}, 8)),
    )  # fmt: skip
    assert found["vllm:num_requests_running"].samples == [Sample("vllm:num_requests_running", OWN, 7)]
    assert found["vllm:num_requests_waiting"].samples == [Sample("vllm:num_requests_waiting", OWN, 2)]
    assert found["vllm:kv_cache_usage_perc"].samples == [Sample("vllm:kv_cache_usage_perc", OWN, 0.25)]
    ended = {one.labels["finished_reason"]: one.value for one in found["vllm:request_success"].samples}
    assert ended == {"stop": 5, "length": 3, "abort": 3, "error": 6}
    queue = {one.name: one.value for one in found["vllm:request_queue_time_seconds"].samples}
    assert queue == {"vllm:request_queue_time_seconds_count": 8, "vllm:request_queue_time_seconds_sum": 3}
    (info,) = found["vllm:cache_config_info"].samples
    assert info.labels == {"block_size": "16", "num_gpu_blocks": "100", "engine": "0"}


def test_more_answers_wait_than_bodies_run() -> None:
    found = made(
        ROUTER,
        family("baton_router_requests_running", "gauge", Sample("baton_router_requests_running", {}, 1)),
        family("baton_router_requests_queued", "gauge", Sample("baton_router_requests_queued", {}, 3)),
    )
    assert found["vllm:num_requests_running"].samples[0].value == 0


def test_buckets_keep_their_counts_and_exemplars() -> None:
    registry = CollectorRegistry()
    own = Histogram("baton_router_request_seconds", "about", buckets=metrics.REQUEST_BUCKETS, registry=registry)
    for seconds in (0.05, 0.31, 2.0):
        own.observe(seconds, {"trace_id": f"{seconds:g}"})
    alias = made(ROUTER, *registry.collect())["vllm:e2e_request_latency_seconds"]
    (found,) = text_string_to_metric_families(render([alias], is_openmetrics=True).decode())  # type: ignore[no-untyped-call]
    buckets = {one.labels["le"]: one for one in found.samples if one.name.endswith("_bucket")}
    assert "0.32" not in buckets, "a bound of Baton's own"
    assert [buckets[le].value for le in ("0.3", "0.5", "1.5", "2.0", "+Inf")] == [1, 2, 2, 3, 3]
    assert buckets["2.0"].exemplar is not None
    assert buckets["2.0"].exemplar.labels == {"trace_id": "2"}
    totals = {one.name.rpartition("_")[2]: one.value for one in found.samples if "le" not in one.labels}
    assert totals == {"count": 3, "sum": pytest.approx(2.36)}


def test_no_model_no_aliases() -> None:
    own = family("baton_router_requests_running", "gauge")
    assert list(with_aliases([own], ROUTER, lambda: None)) == [own]
