"""The values of a page for Prometheus once more, under the names and labels that vLLM 0.33 has for them.

Dashboards, autoscalers and the endpoint picker of the Gateway API inference extension ask for those names. Nothing is
counted for them: an alias is made of the page's own values when the page is made. docs/metrics.md has both tables, and
what is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

ENGINE = "0"  # vLLM's label for one of several engines behind one server


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheFacts:
    """What a process knows of the model that it serves, and of its KV blocks. A router knows those of all its decode
    workers together."""

    model: str
    block_size: int  # tokens
    num_blocks: int
    num_used_blocks: int  # owned by a request, a lease or a transfer

    @property
    def usage(self) -> float:
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


class Values:
    """The samples of a page, by their full names."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                self._samples[sample.name].append(sample)

    def of(self, name: str) -> list[Sample]:
        return self._samples[name]

    def total(self, name: str, **labels: str) -> float:
        """Of all samples of this name that have these labels."""
        return sum(one.value for one in self._samples[name] if labels.items() <= one.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Totals by the values of one label."""
        found: defaultdict[str, float] = defaultdict(float)
        for one in self._samples[name]:
            found[one.labels[label]] += one.value
        return dict(found)


Read = Callable[[Values, CacheFacts], float]


@dataclass(slots=True, frozen=True)
class Alias:
    """A gauge or a counter; a counter's name is without `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    about: str
    read: Read

    def family(self, values: Values, facts: CacheFacts) -> Metric:
        labels = {"model_name": facts.model, "engine": ENGINE}
        found = Metric(self.name, self.about, self.kind)
        found.add_sample(_sample_name(self.name, self.kind), labels, self.read(values, facts))
        return found


@dataclass(slots=True, frozen=True)
class ByLabel:
    """A counter with one label more, whose values are made of those of another metric's label."""

    name: str
    about: str
    source: str
    source_label: str
    label: str
    word: Callable[[str], str]
    always: tuple[str, ...] = ()  # values of the label that are there from the beginning
    has_engine: bool = True

    def family(self, values: Values, facts: CacheFacts) -> Metric:
        totals: defaultdict[str, float] = defaultdict(float, dict.fromkeys(self.always, 0.0))
        for value, number in values.by(self.source, self.source_label).items():
            totals[self.word(value)] += number
        found = Metric(self.name, self.about, "counter")
        for value, number in totals.items():
            labels = {"model_name": facts.model} | ({"engine": ENGINE} if self.has_engine else {})
            found.add_sample(f"{self.name}_total", {**labels, self.label: value}, number)
        return found


@dataclass(slots=True, frozen=True)
class Distribution:
    """A histogram, with its exemplars. `bounds`: those of its buckets that vLLM has; all if None. Buckets are
    cumulative, so that to leave some out changes nothing of the others."""

    name: str
    about: str
    source: str
    bounds: tuple[float, ...] | None = None

    def family(self, values: Values, facts: CacheFacts) -> Metric:
        labels = {"model_name": facts.model, "engine": ENGINE}
        kept = None if self.bounds is None else {*self.bounds, float("inf")}
        found = Metric(self.name, self.about, "histogram")
        for one in values.of(f"{self.source}_bucket"):
            if kept is None or float(one.labels["le"]) in kept:
                found.add_sample(
                    f"{self.name}_bucket", {**labels, "le": one.labels["le"]}, one.value, exemplar=one.exemplar
                )
        for end in ("_count", "_sum"):
            found.add_sample(self.name + end, labels, values.total(self.source + end))
        return found


@dataclass(slots=True, frozen=True)
class SumAndCount:
    """A histogram of vLLM's of which only the sum and the number are known."""

    name: str
    about: str
    stages: tuple[str, ...]  # of `baton_router_stage_seconds`

    def family(self, values: Values, facts: CacheFacts) -> Metric:
        labels = {"model_name": facts.model, "engine": ENGINE}
        found = Metric(self.name, self.about, "summary")
        seconds = sum(values.total("baton_router_stage_seconds_total", stage=stage) for stage in self.stages)
        found.add_sample(f"{self.name}_count", labels, values.total("baton_router_request_seconds_count"))
        found.add_sample(f"{self.name}_sum", labels, seconds)
        return found


@dataclass(slots=True, frozen=True)
class CacheConfig:
    """Of vLLM's labels those that others read."""

    name: str = "vllm:cache_config_info"

    def family(self, _values: Values, facts: CacheFacts) -> Metric:
        labels = {"block_size": str(facts.block_size), "num_gpu_blocks": str(facts.num_blocks), "engine": ENGINE}
        found = Metric(self.name, "Tokens of a KV block, and how many blocks there are.", "gauge")
        found.add_sample(self.name, labels, 1.0)
        return found


AnyAlias = Alias | ByLabel | Distribution | SumAndCount | CacheConfig


def _sample_name(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _total(name: str, **labels: str) -> Read:
    return lambda values, _: values.total(name, **labels)


def _running(values: Values, _: CacheFacts) -> float:
    """Several answers to one body wait one by one, and run as one."""
    queued = values.total("baton_router_requests_queued")
    return max(values.total("baton_router_requests_running") - queued, 0.0)


def _finished(reason: str) -> str:
    """vLLM's word for why an answer ended. To call a tool is a stop there, since only its front sees the call."""
    return {
        "stop": "stop",
        "tool_calls": "stop",
        "length": "length",
        "cancelled": "abort",
        "deadline_exceeded": "abort",
    }.get(reason, "error")


# Bounds of vLLM 0.33: vllm/v1/metrics/buckets.py.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

_Named = tuple[str, Literal["gauge", "counter"], str]

_RUNNING: _Named = ("vllm:num_requests_running", "gauge", "Requests that are computed.")
_WAITING: _Named = ("vllm:num_requests_waiting", "gauge", "Requests that wait to be computed.")
_USAGE = Alias(
    "vllm:kv_cache_usage_perc", "gauge", "KV blocks in use. 1 means 100 percent.", lambda _, facts: facts.usage
)
_PROMPT: _Named = ("vllm:prompt_tokens", "counter", "Prompt tokens, those found in a cache included.")
_CACHED: _Named = ("vllm:prompt_tokens_cached", "counter", "Prompt tokens found in a cache.")
_GENERATED: _Named = ("vllm:generation_tokens", "counter", "Tokens of answers.")
_QUERIES: _Named = ("vllm:prefix_cache_queries", "counter", "Prompt tokens that were looked for in prefix caches.")
_HITS: _Named = ("vllm:prefix_cache_hits", "counter", "Prompt tokens that were found there.")
_MEAN = "Mean time between the tokens of an answer."
_BETWEEN = "baton_router_time_per_output_token_seconds"

ROUTER: tuple[AnyAlias, ...] = (
    Alias(
        *_RUNNING,
        _running,
    ),
    Alias(*_WAITING, _total("baton_router_requests_queued")),
    _USAGE,
    Alias(*_PROMPT, _total("baton_router_prompt_tokens_sum")),
    Alias(*_CACHED, _total("baton_router_cached_prompt_tokens_total")),
    Alias(*_GENERATED, _total("baton_router_output_tokens_sum")),
    Alias(*_QUERIES, _total("baton_router_prompt_tokens_sum")),
    Alias(*_HITS, _total("baton_router_cached_prompt_tokens_total")),
    ByLabel(
        "vllm:request_success", "Answers that ended, by why.", "baton_router_answers_total", "reason",
        "finished_reason", _finished, ("stop", "length", "abort", "error"),
    ),
    ByLabel(
        "vllm:admission_rejections", "Requests that were refused because of a limit.", "baton_router_refused_total",
        "limit", "reason", str, has_engine=False,
    ),
    Distribution(
        "vllm:time_to_first_token_seconds", "From a request to its first token.",
        "baton_router_time_to_first_token_seconds", _FIRST_TOKEN,
    ),
    Distribution("vllm:inter_token_latency_seconds", _MEAN, _BETWEEN, _BETWEEN_TOKENS),
    Distribution("vllm:request_time_per_output_token_seconds", _MEAN, _BETWEEN, _BETWEEN_TOKENS),
    Distribution(
        "vllm:e2e_request_latency_seconds", "From a request to its last token.",
        "baton_router_request_seconds", _REQUEST,
    ),
    Distribution("vllm:request_prompt_tokens", "Prompt tokens of a request.", "baton_router_prompt_tokens"),
    Distribution("vllm:request_generation_tokens", "Tokens of an answer.", "baton_router_output_tokens"),
    SumAndCount("vllm:request_queue_time_seconds", "Time in queues.", ("router_queue", "queue")),
    SumAndCount("vllm:request_prefill_time_seconds", "Time in prefill.", ("prefill",)),
    SumAndCount("vllm:request_decode_time_seconds", "Time from the first token to the last.", ("decode",)),
    SumAndCount("vllm:request_inference_time_seconds", "Time in prefill and decode.", ("prefill", "decode")),
    CacheConfig(),
)  # fmt: skip

WORKER: tuple[AnyAlias, ...] = (
    Alias(*_RUNNING, _total("baton_worker_requests_running")),
    Alias(*_WAITING, _total("baton_worker_requests_waiting")),
    _USAGE,
    Alias(*_PROMPT, _total("baton_worker_prompt_tokens_total")),
    Alias(*_CACHED, _total("baton_worker_cached_prompt_tokens_total")),
    Alias(*_GENERATED, _total("baton_worker_output_tokens_total")),
    Alias(*_QUERIES, _total("baton_worker_prompt_tokens_total")),
    Alias(*_HITS, _total("baton_worker_cached_prompt_tokens_total")),
    Alias(
        "vllm:num_preemptions", "counter", "Times that a request gave its KV blocks back.",
        _total("baton_worker_preemptions_total"),
    ),
    Distribution(
        "vllm:request_queue_time_seconds", "From a request to its first step.", "baton_worker_queue_seconds", _REQUEST
    ),
    CacheConfig(),
)  # fmt: skip


def with_aliases(
    families: Iterable[Metric], aliases: Iterable[AnyAlias], facts: Callable[[], CacheFacts | None]
) -> Iterator[Metric]:
    """`families`, and then the aliases of their values; none while `facts` gives none, as no model is known yet."""
    found = list(families)
    yield from found
    known = facts()
    if known is not None:
        values = Values(found)
        for alias in aliases:
            yield alias.family(values, known)
