"""Every metric of every process, declared once: name, meaning, labels.

Units are in the names, as Prometheus asks: `_seconds`, `_bytes`, `_total`. Buckets of latencies reach from a
millisecond to the longest request anyone waits for.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

# ------------------------------------------------------------------------------------------------ router

router_requests = Counter("baton_router_requests", "Requests that ended, by how they ended.", ["interface", "outcome"])
router_requests_running = Gauge("baton_router_requests_running", "Requests that a client is waiting for.")
router_prompt_tokens = Histogram("baton_router_prompt_tokens", "Prompt tokens of a request.", buckets=TOKEN_BUCKETS)
router_output_tokens = Histogram("baton_router_output_tokens", "Tokens of an answer.", buckets=TOKEN_BUCKETS)
router_cached_tokens = Counter("baton_router_cached_prompt_tokens", "Prompt tokens found in a prefix cache.")
router_ttft = Histogram(
    "baton_router_time_to_first_token_seconds",
    "From the request at the router to its first token there.",
    buckets=LATENCY_BUCKETS,
)
router_tpot = Histogram(
    "baton_router_time_per_output_token_seconds",
    "Mean time between the tokens of one answer, after its first.",
    buckets=LATENCY_BUCKETS,
)
router_e2e = Histogram(
    "baton_router_request_seconds", "From the request at the router to its last token.", buckets=LATENCY_BUCKETS
)
router_retries = Counter(
    "baton_router_retries", "Requests sent to another decode worker before their first token.", ["reason"]
)
router_migrations = Counter(
    "baton_router_migrations", "Requests moved to another decode worker after their first token.", ["reason"]
)
router_retries_refused = Counter(
    "baton_router_retries_refused", "Requests that failed because the retry budget was spent."
)
router_fallbacks = Counter("baton_router_fallbacks", "Answers for which the decode worker computed KV itself.")
router_endpoints = Gauge("baton_router_endpoints", "Workers as this router sees them.", ["role", "state"])
router_decisions = Counter("baton_router_decisions", "Routing decisions, by where the prompt is computed.", ["prefill"])
router_endpoint_requests = Gauge(
    "baton_router_endpoint_requests", "Requests that this router has running on a decode worker.", ["address"]
)
