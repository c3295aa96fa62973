"""Makes, from the settings, the parts that answer requests of every interface."""

from __future__ import annotations

import secrets

from common.config import RouterSettings
from common.tracing import Traces
from router.fleet.registry import Registry
from router.limits.admission import Admission
from router.limits.gate import MESSAGE_BYTES, MIB, Gate, GateLimits
from router.limits.quotas import Quotas
from router.policy.base import Policy
from router.policy.registry import create_policy
from router.preparing.preparation import Preparation, never_traced
from router.processes.router_process import RouterProcess
from router.running.dispatch import Dispatcher
from router.running.embedding import Embedder
from router.running.picks import Picks
from router.running.prefix_hints import PrefixHints
from router.running.retries import DispatchLimits, Retries
from router.running.routes import Routes
from router.running.threads import TextThreads
from router.serving.embeddings import Embeddings
from router.serving.endings import Endings
from router.serving.gateway import Gateway
from router.serving.generation import Generation
from text.template_process import shared_process


def make_gateway(
    settings: RouterSettings,
    registry: Registry,
    process: RouterProcess,
    quotas: Quotas,
    threads: TextThreads,
    grammar_threads: TextThreads,
    limits: DispatchLimits | None = None,
    *,
    template_threads: TextThreads | None = None,
    traces: Traces | None = None,
    picks: Picks | None = None,
) -> Gateway:
    """Raises `ConfigError` for a policy that there is not."""
    gate = Gate(_gate_limits(settings), ledger=process.ledger)
    admission = Admission(
        registry,
        process.demand,
        gate,
        worker_wait_s=settings.worker_wait,
        max_request_bytes=_bytes(settings.max_request_mb),
        quotas=quotas,
        queue=process.queue,
        ledger=process.ledger,
    )
    preparation = Preparation(
        request_timeout_s=settings.request_timeout,
        control_tokens=settings.control_tokens,
        threads=threads,
        grammar_threads=grammar_threads,
        template_threads=template_threads,
        make_template=shared_process().template if settings.trust_request_chat_template else None,
        max_answer_tokens=settings.max_answer_tokens,
        max_retain_s=settings.max_retain,
        generic_tools=settings.generic_tools,
        begin_trace=never_traced if traces is None else traces.begin,
    )
    routes = Routes(
        registry, policy_of(settings), process.decisions, refuses_late=settings.slo_late == "refuse", picks=picks
    )
    retries = Retries(registry, limits)
    endings = _endings(settings, process, traces)
    return Gateway(
        admission,
        preparation,
        Generation(Dispatcher(registry, routes, retries), admission, endings),
        routes,
        Embeddings(Embedder(registry, routes, retries, admission), endings),
        PrefixHints(registry, routes, admission, threads),
        process,
        also_reasoning=settings.also_reasoning,
        per_request_metrics=settings.per_request_metrics,
        metrics_aliases=settings.metrics_aliases,
    )


def _endings(settings: RouterSettings, process: RouterProcess, traces: Traces | None) -> Endings:
    slow_ms = settings.slow_request_ms
    return Endings(
        process.requests,
        slow_s=None if slow_ms is None else slow_ms / 1000,
        slow_factor=settings.slow_target_factor,
        spans=traces,
        with_content=settings.trace_content,
    )


def policy_of(settings: RouterSettings) -> Policy:
    """Raises `ConfigError` for a name that there is not."""
    return create_policy(
        settings.policy,
        prefill=settings.prefill_policy,
        decode=settings.decode_policy,
        min_remote_tokens=settings.min_remote_tokens or 0,
        hedges=settings.hedge_prefill,
        seed=secrets.randbits(64),
    )


def _gate_limits(settings: RouterSettings) -> GateLimits:
    return GateLimits(
        max_requests=settings.max_requests,
        max_requests_per_key=settings.max_requests_per_key,
        max_buffered_bytes=_bytes(settings.max_buffered_mb) or 1,
        max_message_bytes=_bytes(settings.max_request_mb) or MESSAGE_BYTES,
        receive_timeout_s=settings.receive_timeout,
        answer_timeout_s=settings.request_timeout + settings.receive_timeout,
    )


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else max(1, int(mib * MIB))
