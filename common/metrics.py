"""Every metric of every process, declared once: name, meaning, labels.

Units are in the names, as Prometheus asks: `_seconds`, `_bytes`, `_total`.

Bounds of histograms include those that OpenTelemetry's conventions name for `gen_ai.server.*` and
`gen_ai.client.token.usage` (https://github.com/open-telemetry/semantic-conventions-genai), and those of vLLM 0.33, so
that a rule about one bucket (`le="2.5"`) reads the same of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.32, 0.5, 0.64, 0.8, 1.0, 1.28, 1.5, 2.0, 2.5, 2.56, 5.0, 5.12, 10.0, 10.24,
    15.0, 20.0, 20.48, 30.0, 40.0, 40.96, 50.0, 60.0, 81.92, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
WORKER_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576,
)  # fmt: skip
PICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


def _gauge(
    name: str, about: str, labels: Sequence[str] = (), *, of_several: Literal["livesum", "livemax"] = "livesum"
) -> Gauge:
    """`of_several`: what a router of several processes shows of their values."""
    return Gauge(name, about, labels, multiprocess_mode=of_several)


def _counter(name: str, about: str, label: str, values: Sequence[str]) -> Counter:
    """With a series for each of these values from the beginning: a rate sees no increase in a series' first sample."""
    made = Counter(name, about, [label])
    for value in values:
        made.labels(value)
    return made


file_reloads = Counter(
    "baton_file_reloads", "Times that changed certificates or API keys were read, by outcome.", ["what", "outcome"]
)

process_tasks = _gauge(
    "baton_process_tasks",
    "Tasks of a router's or worker's event loop, counted once a second: what requests in flight make, and some more.",
)
trace_spans = _counter(
    "baton_trace_spans",
    "Spans of requests that are traced: made, sent to the collector, or failed to be sent. What is missing waits "
    "still, or was dropped because too many waited.",
    "outcome",
    ("made", "sent", "failed"),
)

# ------------------------------------------------------------------------------------------------ router

router_requests = Counter("baton_router_requests", "Requests that ended, by how they ended.", ["interface", "outcome"])
router_unauthenticated = Counter(
    "baton_router_unauthenticated", "Calls that were refused for want of a known API key.", ["interface"]
)
router_refused = Counter(
    "baton_router_refused", "Calls and connections that were refused because of a limit of the router.", ["limit"]
)
router_answers = _counter(
    "baton_router_answers",
    "Answers that ended, by why: their finish reason, or the gRPC status of what went wrong. A request may have many.",
    "reason",
    ("stop", "length", "tool_calls"),
)
router_batch_requests = _counter(
    "baton_router_batch_requests",
    "Requests of batches (/v1/batches) that have their answer.",
    "outcome",
    ("ok", "failed"),
)
router_picks = _counter(
    "baton_router_picks",
    "Requests of a Gateway that the endpoint picker was asked about: it named workers, too (workers), a router alone "
    "(router), refused for load (overloaded), for want of a router or worker (unavailable) or for another reason "
    "(refused), or the Gateway ended the call before (cut).",
    "outcome",
    ("workers", "router", "overloaded", "unavailable", "refused", "cut"),
)
router_pick = Histogram(
    "baton_router_pick_seconds",
    "From the whole of a Gateway's request at the endpoint picker to its choice.",
    buckets=PICK_BUCKETS,
)
router_picks_served = _counter(
    "baton_router_picks_served",
    "Responses of routers that the endpoint picker had named, by who served it, as the Gateway says: the first that "
    "was named, a later one (fallback), one that was not named (other), or nobody said it (unknown).",
    "by",
    ("first", "fallback", "other", "unknown"),
)
router_picked_requests = _counter(
    "baton_router_picked_requests",
    "Requests that came with workers that an endpoint picker chose: they went there (followed), or were routed anew, "
    "because these workers cannot take it any more (gone), too much time has passed (expired), the choice was for "
    "another request (other), or is none of this router's pickers' (unknown).",
    "outcome",
    ("followed", "gone", "expired", "other", "unknown"),
)
router_batch_pauses = Counter(
    "baton_router_batch_pauses",
    "Times that a request of a batch left its worker, to go on later, because other requests came.",
)
router_stored_responses = _counter(
    "baton_router_stored_responses",
    "Responses (/v1/responses) that were stored, and what became of them. lost: one that should have been stored, and "
    "could not; displaced: forgotten to make room.",
    "event",
    ("stored", "lost", "displaced", "expired", "deleted"),
)
router_requests_running = _gauge("baton_router_requests_running", "Requests that a client is waiting for.")
router_requests_queued = _gauge("baton_router_requests_queued", "Requests that wait in the router for their turn.")
router_prompt_tokens = Histogram("baton_router_prompt_tokens", "Prompt tokens of a request.", buckets=TOKEN_BUCKETS)
router_output_tokens = Histogram("baton_router_output_tokens", "Tokens of an answer.", buckets=TOKEN_BUCKETS)
router_cached_tokens = Counter("baton_router_cached_prompt_tokens", "Prompt tokens found in a prefix cache.")
router_ttft = Histogram(
    "baton_router_time_to_first_token_seconds",
    "From the request at the router to its first token there.",
    buckets=FIRST_TOKEN_BUCKETS,
)
router_tpot = Histogram(
    "baton_router_time_per_output_token_seconds",
    "Mean time between the tokens of one answer, after its first.",
    buckets=BETWEEN_TOKENS_BUCKETS,
)
router_e2e = Histogram(
    "baton_router_request_seconds", "From the request at the router to its last token.", buckets=REQUEST_BUCKETS
)
router_slo_requests = Counter(
    "baton_router_slo_requests",
    "Answers with latency targets or a class that ended, by class and by what became of each target: met, missed, or "
    "none (there was no such target, or it is not known).",
    ["class", "ttft", "tpot"],
)
router_goodput_requests = Counter(
    "baton_router_goodput_requests", "Whole answers that met each of their latency targets, by class.", ["class"]
)
router_goodput_tokens = Counter("baton_router_goodput_tokens", "Tokens of those answers.", ["class"])
router_stages = _counter(
    "baton_router_stage_seconds",
    "Time of complete answers, by stage: router_queue (for a turn), queue (at workers), prefill, handoff, decode "
    "(first token to last).",
    "stage",
    ("router_queue", "queue", "prefill", "handoff", "decode"),
)
router_prediction = Histogram(
    "baton_router_measured_to_predicted_ratio",
    "What a complete answer took, divided by what its routing decision predicted: until the first token (first_token), "
    "between two tokens (token). Of one answer in eight, if all workers said how long their steps take.",
    ["of"],
    buckets=RATIO_BUCKETS,
)
for _of in ("first_token", "token"):
    router_prediction.labels(_of)
router_retries = Counter(
    "baton_router_retries", "Requests sent to another worker before their first token, or embedding.", ["reason"]
)
router_migrations = Counter(
    "baton_router_migrations",
    "Requests moved to another decode worker: lost after the first token (by gRPC status), or handed over by one that "
    "drains (drain) or takes prompts alone from now on (role).",
    ["reason"],
)
router_retries_refused = Counter(
    "baton_router_retries_refused", "Requests that failed because the retry budget was spent."
)
router_spares_withheld = Counter(
    "baton_router_spares_withheld",
    "Attempts for which the decode worker was named one prefill worker and no spare, as the retry budget was spent.",
)
router_suspensions = _counter(
    "baton_router_suspensions",
    "Times that a worker was left alone for a while: after failures in a row (failures), or slower than others (slow).",
    "reason",
    ("failures", "slow"),
)
router_fallbacks = Counter("baton_router_fallbacks", "Answers for which the decode worker computed KV itself.")
router_endpoints = _gauge(
    "baton_router_endpoints", "Workers as this router sees them.", ["role", "state"], of_several="livemax"
)
router_paused = _gauge(
    "baton_router_paused", "1 while an operator has this router take no new requests.", of_several="livemax"
)
router_aborted = Counter("baton_router_aborted", "Answers and embeddings that an operator ended.")
router_false_workers = _counter(
    "baton_router_false_workers",
    "Times that a worker said what cannot be, by what it spoke of: itself (info), its KV (blocks), or an "
    "answer (tokens).",
    "about",
    ("info", "blocks", "tokens"),
)
router_block_resyncs = Counter(
    "baton_router_block_resyncs", "Times that a stream of a worker's KV blocks broke, or lacked a message."
)
router_known_blocks = _gauge(
    "baton_router_known_blocks", "KV blocks that this router knows to be on some worker.", of_several="livemax"
)
router_process_restarts = Counter(
    "baton_router_process_restarts", "Processes of this router that took the place of one that ended."
)
router_decisions = _counter(
    "baton_router_decisions",
    "Routing decisions, by where the prompt is computed: by a prefill worker (remote), by the decode worker "
    "(in_place), or its first part remotely and the rest in place (split).",
    "prefill",
    ("remote", "in_place", "split"),
)
router_late_requests = Counter(
    "baton_router_late_requests",
    "Requests whose first token no workers can give in time, as they predict it: refused, or served all the same "
    "(--slo-late). By what is too long: the prompts before it (queue), or its own alone (prompt).",
    ["outcome", "reason"],
)
for _outcome in ("refused", "best_effort"):
    for _reason in ("queue", "prompt"):
        router_late_requests.labels(_outcome, _reason)
router_expected_cached_tokens = Counter(
    "baton_router_expected_cached_tokens", "Prompt tokens that the chosen decode workers were thought to have."
)
router_endpoint_requests = _gauge(
    "baton_router_endpoint_requests", "Requests that this router has running on a decode worker.", ["address"]
)

# -------------------------------------------------------------------------------------------- autoscaler

prefill_queued_tokens = _gauge("baton_prefill_queued_tokens", "Prompt tokens not computed yet, all prefill workers.")
prefill_queued_tokens_per_pod = _gauge(
    "baton_prefill_queued_tokens_per_pod", "Prompt tokens not computed yet, mean of the ready prefill workers."
)
prefill_arrival_tokens = _gauge(
    "baton_prefill_arrival_tokens_per_second", "Prompt tokens that arrive at the routers in a second."
)
decode_kv_usage = _gauge("baton_decode_kv_usage", "Share of KV blocks in use, mean of the ready decode workers.")
decode_kv_used_pods = _gauge("baton_decode_kv_used_pods", "Share of KV blocks in use, summed over decode workers.")
decode_requests = _gauge("baton_decode_requests", "Requests running and waiting, all decode workers.")
decode_requests_per_pod = _gauge(
    "baton_decode_requests_per_pod", "Requests running and waiting, mean of the ready decode workers."
)
desired_replicas = _gauge("baton_desired_replicas", "Workers that the planner wants.", ["role"])
advised_replicas = _gauge("baton_advised_replicas", "Workers that --planner model would want, if advisory.", ["role"])
needed_replicas = _gauge("baton_needed_replicas", "Workers that the load asks for, before limits and delays.", ["role"])
autoscaler_workers = _gauge("baton_autoscaler_workers", "Workers as the autoscaler sees them.", ["role", "state"])
autoscaler_held_requests = _gauge(
    "baton_autoscaler_held_requests", "Requests that routers hold until a first worker is ready."
)
autoscaler_leads = _gauge("baton_autoscaler_leads", "1 if this replica sets replicas and deletion costs.")
autoscaler_scalings = Counter("baton_autoscaler_scalings", "Changes of replicas made.", ["role", "direction"])
autoscaler_role_shifts = Counter(
    "baton_autoscaler_role_shifts", "Workers of both roles that were told to take work of another role.", ["role"]
)
autoscaler_failures = _counter(
    "baton_autoscaler_failures", "What the cluster (act) or a worker (role) refused.", "action", ("act", "role")
)

# ------------------------------------------------------------------------------------------------ worker

worker_requests_running = _gauge("baton_worker_requests_running", "Requests in the engine, or waiting for remote KV.")
worker_requests_waiting = _gauge("baton_worker_requests_waiting", "Requests that wait for room in the engine.")
worker_queued_prompt_tokens = _gauge("baton_worker_queued_prompt_tokens", "Prompt tokens whose KV is not computed yet.")
worker_kv_blocks = _gauge("baton_worker_kv_blocks", "KV blocks that are empty, cached or owned.", ["state"])
worker_leases = _gauge("baton_worker_leases", "Finished prefills whose blocks are held for a decode worker.")
worker_leases_kept = Counter(
    "baton_worker_leases_kept",
    "Prefill streams that ended otherwise than by their decode worker's word, and whose blocks were kept for a while.",
)
worker_role_shifts = Counter(
    "baton_worker_role_shifts",
    "Changes of the role that a worker of both roles takes work of, by the new role and by whom (planner, operator).",
    ["role", "by"],
)
worker_paused = _gauge("baton_worker_paused", "1 while an operator has this worker take no new work.")
worker_streams = Counter("baton_worker_streams", "Streams that ended, by service and gRPC status.", ["service", "code"])
worker_decode_calls = Counter(
    "baton_worker_decode_calls",
    "Requests to a decode worker, by the method that brought them. Routers of the release before use Decode.",
    ["method"],
)
worker_prompts = _counter(
    "baton_worker_prompts",
    "Prompts of answers that a decode worker completed, by where it had them computed: here, by a prefill worker "
    "(remote), whether or not that came to an end, or their first part there and the rest here (split).",
    "place",
    ("here", "remote", "split"),
)
worker_prompt_tokens = Counter(
    "baton_worker_prompt_tokens", "Tokens of prompts that this worker is done with, those in a cache included."
)
worker_cached_tokens = Counter("baton_worker_cached_prompt_tokens", "Tokens of these that were in a cache.")
worker_output_tokens = Counter("baton_worker_output_tokens", "Tokens of answers that this worker completed.")
worker_streams_cut = Counter("baton_worker_streams_cut", "Streams that the drain timeout cut, by service.", ["service"])
worker_streams_unread = Counter(
    "baton_worker_streams_unread", "Streams that were ended because their caller did not read them."
)
worker_requests_refused = Counter(
    "baton_worker_requests_refused", "Requests refused because too many, or too many tokens, waited already."
)
worker_engine_hangs = Counter("baton_worker_engine_hangs", "Engine processes killed because they gave no sign of life.")
worker_prefill_failures = Counter(
    "baton_worker_prefill_failures", "Prefill streams that failed under a decode worker, by gRPC status.", ["code"]
)
worker_hedges = _counter(
    "baton_worker_hedges",
    "Times that a prefill worker was late, and another one was asked beside it (or not, as too many were: refused).",
    "outcome",
    ("asked", "refused"),
)
worker_hedges_won = Counter("baton_worker_hedges_won", "Those of them in which that other prefill worker was first.")
worker_fallbacks = Counter("baton_worker_fallbacks", "Requests whose remote KV this decode worker had to compute.")
worker_steps_given_up = _counter(
    "baton_worker_steps_given_up",
    "Steps that ended early, between two layers: all their requests had ended, or they had prompts alone and a request "
    "came whose target would not have held after them.",
    "reason",
    ("ended", "urgent"),
)
worker_preemptions = Counter("baton_worker_preemptions", "Times that a request gave its KV blocks back.")
worker_late_requests = Counter(
    "baton_worker_late_requests",
    "Requests that could not meet their latency targets any more when their turn had not come yet: refused, or served "
    "as best effort (--slo-late). By cause: late even alone, or only if others go first that it would make late.",
    ["outcome", "cause"],
)
for _outcome in ("refused", "best_effort"):
    for _cause in ("late", "others"):
        worker_late_requests.labels(_outcome, _cause)
worker_goes_by_slack = _gauge(
    "baton_worker_goes_by_slack",
    "1 while the worker computes first what has the least slack (--queue-policy auto or slo); else 0.",
)
worker_kv_blocks_moved = Counter("baton_worker_kv_blocks_moved", "KV blocks fetched from elsewhere.")
worker_kv_blocks_lost = Counter("baton_worker_kv_blocks_lost", "KV blocks whose fetch failed.")
worker_kv_blocks_lent = _counter(
    "baton_worker_kv_blocks_lent",
    "KV blocks that a prefill worker asked a decode worker for: read from its cache, or failed and computed.",
    "outcome",
    ("read", "failed"),
)
worker_kv_bytes_moved = Counter("baton_worker_kv_bytes_moved", "Bytes of KV blocks fetched from elsewhere.")
worker_kv_cache_hits = _counter(
    "baton_worker_kv_cache_hits",
    "KV blocks of prompts that were found and not computed, by where.",
    "tier",
    ("device", "host", "store", "decode"),
)
worker_kv_tier_moves = _counter(
    "baton_worker_kv_tier_moves",
    "KV blocks evicted to host memory (demoted), found there (promoted), put there with their request (swapped_out), "
    "computed and written to the store (stored), or gone before the store had them (dropped).",
    "move",
    ("demoted", "promoted", "swapped_out", "stored", "dropped"),
)
worker_kv_retentions = _counter(
    "baton_worker_kv_retentions",
    "KV blocks that hints asked to retain (retained), that were not or no longer, as tenants may have so many "
    "(outbid), or that were evicted all the same as no other was left (yielded).",
    "event",
    ("retained", "outbid", "yielded"),
)
worker_kv_retained_blocks = _gauge(
    "baton_worker_kv_retained_blocks", "KV blocks that are evicted after others, because a hint asks for it."
)
worker_queue = Histogram(
    "baton_worker_queue_seconds", "From a request at the engine to its first step.", buckets=WORKER_BUCKETS
)
worker_draft_tokens = _counter(
    "baton_worker_draft_tokens",
    "Tokens of answers that were guessed, by whether the model drew the same.",
    "outcome",
    ("accepted", "refused"),
)
worker_step_time_error = _gauge(
    "baton_worker_step_time_error_ratio",
    "What the model of time was wrong by on the latest steps, as a share of their times: median and 90th percentile.",
    ["percentile"],
)
worker_step_time_drifts = _gauge(
    "baton_worker_step_time_drifts", "1 if steps take other times than the model of time says, all the time."
)
worker_handoff = Histogram(
    "baton_worker_handoff_seconds",
    "From the first token at a decode worker, or the end of a split prompt's first part, to the last KV block there.",
    buckets=WORKER_BUCKETS,
)

# ---------------------------------------------------------------------------------------------- KV store

kv_store_bytes = _gauge("baton_kv_store_bytes", "Bytes in --kv-dir as of this worker's last pass (with a size limit).")
kv_store_runs = _gauge("baton_kv_store_runs", "Files of KV blocks in --kv-dir, as of this worker's last pass.")
kv_store_evicted_runs = Counter("baton_kv_store_evicted_runs", "Files of KV blocks that this worker evicted.")
kv_store_evicted_bytes = Counter("baton_kv_store_evicted_bytes", "Bytes of KV blocks that this worker evicted.")
kv_store_failed_blocks = _counter(
    "baton_kv_store_failed_blocks",
    "KV blocks that could not be written to or read from the store.",
    "action",
    ("write", "read"),
)
kv_store_failed_lookups = Counter(
    "baton_kv_store_failed_lookups", "Lookups that the store did not answer in time: what it may hold was not used."
)

worker_grammars = _counter(
    "baton_worker_grammars",
    "Grammars of guided requests, by what came of them: cached, compiled, wrong (by its client), failed, late, full.",
    "outcome",
    ("cached", "compiled", "wrong", "failed", "late", "full"),
)
worker_grammar_seconds = Counter(
    "baton_worker_grammar_seconds", "Time that compiled and wrong grammars took, with their wait for a thread."
)

ENGINE_METRICS: tuple[Counter | Gauge, ...] = (
    kv_store_bytes, kv_store_runs, kv_store_evicted_runs, kv_store_evicted_bytes, kv_store_failed_blocks,
    kv_store_failed_lookups, worker_fallbacks, worker_kv_cache_hits, worker_kv_tier_moves,
    worker_grammars, worker_grammar_seconds, worker_draft_tokens, worker_kv_retentions, worker_kv_retained_blocks,
    worker_goes_by_slack, worker_late_requests, worker_preemptions, worker_steps_given_up,
)  # fmt: skip
"""Metrics that an engine process counts and its front shows."""
