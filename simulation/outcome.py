"""What came of a simulation: each request's times, and the figures that are told of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from common.goodput import Goodput, is_good
from common.percentiles import percentile
from common.types import WorkerRole
from router.autoscaler.roles import Shift

SHARES = (0.5, 0.9, 0.99)


class RequestOutcome(msgspec.Struct, eq=False):
    at: float  # seconds after the start
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None = None  # from its arrival
    e2e_s: float = 0.0
    num_cached_tokens: int = 0  # of the prompt, that the worker which computed it did not compute
    num_bytes_moved: int = 0
    num_preemptions: int = 0
    decode: str = ""
    prefill: str = ""  # empty: the decode worker computed the prompt
    failure: str = ""
    tenant: str = ""
    queue_s: float = 0.0  # in the router's queue
    num_hedges: int = 0  # prefill workers asked beside a late one
    is_hedge_won: bool = False  # the one that was asked beside it came first
    num_retries: int = 0  # workers asked in place of others, which refused it
    num_tail_tokens: int = 0  # of a split prompt: those that the decode worker was to compute
    was_late: bool = False  # the router or a worker held its targets for missed: it is refused, or served all the same
    late_cause: str = ""  # `LateRequest.cause` of the worker that said so; empty if it was the router

    @property
    def tpot_s(self) -> float | None:
        """Mean time between two tokens; None for an answer of one."""
        if self.num_output_tokens < 2 or self.ttft_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    def is_good(self, goodput: Goodput) -> bool:
        if self.failure or self.ttft_s is None:
            return False
        return is_good(goodput, ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2el_s=self.e2e_s)


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    requests: Sequence[RequestOutcome]
    seconds: float  # until the last answer's end
    paid_s: Mapping[WorkerRole, float]  # of workers, from asking for them to their end
    busy_s: Mapping[WorkerRole, float]  # of their devices
    num_steps: int
    num_transfers: int
    num_bytes: int  # moved from worker to worker
    transfer_s: float  # of all transfers together, what they waited for others included
    shifts: Sequence[tuple[float, Shift]] = ()  # of workers' roles: when, and which
    scaled: Sequence[tuple[float, Mapping[WorkerRole, int]]] = ()  # when, and the workers wanted from then on

    def failures(self) -> dict[str, int]:
        """How many requests failed for which reason, the most common one first. Numbers in reasons are left out."""
        reasons = Counter(re.sub(r"\d+", "N", one.failure) for one in self.requests if one.failure)
        return dict(reasons.most_common())

    def summary(self, goodput: Goodput) -> dict[str, float]:
        """Figures by name: milliseconds in `_ms`, shares from 0 to 1. What has no value is left out."""
        served = [one for one in self.requests if not one.failure and one.ttft_s is not None]
        prompt_tokens = sum(one.num_prompt_tokens for one in served)
        num_good = sum(one.is_good(goodput) for one in served)
        found: dict[str, float] = {
            "requests": len(self.requests),
            "failed": len(self.requests) - len(served),
            **({"role_shifts": len(self.shifts)} if self.shifts else {}),
            "duration_s": self.seconds,
            "request_throughput": len(served) / self.seconds,
            "output_throughput": sum(one.num_output_tokens for one in served) / self.seconds,
            "request_goodput": num_good / self.seconds,
            "good_share": num_good / max(len(self.requests), 1),
        }
        if num_late := sum(one.was_late for one in self.requests):
            found["late"] = num_late
            found["late_by_others"] = sum(one.late_cause == "others" for one in self.requests)
            # Served after all, these met every target.
            found["late_but_good"] = sum(one.was_late and one.is_good(goodput) for one in served)
        if any(one.queue_s for one in served):
            waits = sorted(one.queue_s for one in served)
            found["mean_queue_ms"] = 1000 * math.fsum(waits) / len(waits)
            found["p99_queue_ms"] = 1000 * percentile(waits, 0.99)
        if num_retries := sum(one.num_retries for one in self.requests):
            found["retries"] = num_retries
        if num_split := sum(one.num_tail_tokens > 0 for one in served):
            found["split_share"] = num_split / len(served)
        if num_hedges := sum(one.num_hedges for one in self.requests):
            found["hedges"] = num_hedges
            found["hedges_won"] = sum(one.is_hedge_won for one in self.requests)
        for name, value_of in MEASURES.items():
            values = sorted(value for one in served if (value := value_of(one)) is not None)
            if values:
                found[f"mean_{name}_ms"] = 1000 * math.fsum(values) / len(values)
                for share in SHARES:
                    found[f"p{round(100 * share)}_{name}_ms"] = 1000 * percentile(values, share)
        found |= {
            "cached_share": sum(one.num_cached_tokens for one in served) / max(prompt_tokens, 1),
            "in_place_share": sum(not one.prefill for one in served) / max(len(served), 1),
            "preemptions": sum(one.num_preemptions for one in self.requests),
            "transfers": self.num_transfers,
            "transferred_gb": self.num_bytes / 1e9,
            "mean_transfer_ms": 1000 * self.transfer_s / max(self.num_transfers, 1),
            "steps": self.num_steps,
        }
        for role, seconds in self.paid_s.items():
            found[f"{role.value}_worker_hours"] = seconds / 3600
            found[f"{role.value}_busy_share"] = self.busy_s.get(role, 0.0) / seconds
        hours = math.fsum(self.paid_s.values()) / 3600
        found["worker_hours"] = hours
        found["good_requests_per_worker_hour"] = num_good / hours if hours else 0.0
        return found

    def by_tenant(self, goodput: Goodput) -> dict[str, dict[str, float]]:
        """Figures of each tenant, if requests have any: names as in `summary`, and the share of all output tokens."""
        tenants = sorted({one.tenant for one in self.requests if one.tenant})
        num_all = sum(one.num_output_tokens for one in self.requests if not one.failure and one.ttft_s is not None)
        found: dict[str, dict[str, float]] = {}
        for tenant in tenants:
            own = [one for one in self.requests if one.tenant == tenant]
            served = [one for one in own if not one.failure and one.ttft_s is not None]
            figures: dict[str, float] = {
                "requests": len(own),
                "failed": len(own) - len(served),
                "good_share": sum(one.is_good(goodput) for one in served) / len(own),
                "output_token_share": sum(one.num_output_tokens for one in served) / max(num_all, 1),
            }
            for name, value_of in TENANT_MEASURES.items():
                if values := sorted(value for one in served if (value := value_of(one)) is not None):
                    figures[f"p50_{name}_ms"] = 1000 * percentile(values, 0.5)
                    figures[f"p99_{name}_ms"] = 1000 * percentile(values, 0.99)
            found[tenant] = figures
        return found


MEASURES: dict[str, Callable[[RequestOutcome], float | None]] = {
    "ttft": lambda one: one.ttft_s,
    "tpot": lambda one: one.tpot_s,
    "e2el": lambda one: one.e2e_s,
}
TENANT_MEASURES: dict[str, Callable[[RequestOutcome], float | None]] = {
    "queue": lambda one: one.queue_s,
    "ttft": lambda one: one.ttft_s,
}
