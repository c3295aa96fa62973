"""Makes helm/files/dashboard.json, Grafana's view of a fleet, from the list of panels below.

    python -m tools.dashboard --write      after a change of it

Each panel is a title, a unit and queries with their legends. Labels that are not Baton's own are those that the
Prometheus operator puts on what the chart's monitors scrape: namespace, pod, container.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.generated import main

PATH = Path(__file__).parents[1] / "helm" / "files" / "dashboard.json"
WIDTH, COLUMNS, HEIGHT = 24, 3, 8

ALL = 'namespace="$namespace"'
ROUTER = f'{ALL},container="router"'
AUTOSCALER = f'{ALL},container="autoscaler"'
PREFILL = f'{ALL},container=~"prefill|worker"'
DECODE = f'{ALL},container=~"decode|worker"'
WORKERS = f'{ALL},container=~"prefill|decode|worker"'


@dataclass(slots=True, frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name
    queries: tuple[tuple[str, str], ...]  # PromQL, legend
    description: str = ""


def rate(metric: str, where: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantiles(metric: str, where: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, {rate(f'{metric}_bucket', where, 'le')})", f"p{int(q * 100)}")
        for q in (0.5, 0.9, 0.99)
    )


def quantiles_by(label: str, metric: str, where: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({q}, {rate(f'{metric}_bucket', where, f'le, {label}')})",
            f"{{{{{label}}}}} p{int(q * 100)}",
        )
        for q in (0.5, 0.9)
    )


def total(metric: str, where: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{where}}})"


def newest(metric: str, by: str = "") -> str:
    """Every autoscaler replica reports the whole fleet: any one's value will do."""
    return f'max{f" by ({by})" if by else ""} ({metric}{{namespace="$namespace"}})'


ROWS: dict[str, list[Panel]] = {
    "Router": [
        Panel(
            "Requests",
            "reqps",
            (
                (rate("baton_router_requests_total", ROUTER, "outcome"), "{{outcome}}"),
                (rate("baton_router_batch_requests_total", ROUTER, "outcome"), "of batches: {{outcome}}"),
                (rate("baton_router_batch_pauses_total", ROUTER), "of batches: made way"),
                (rate("baton_router_stored_responses_total", ROUTER, "event"), "responses: {{event}}"),
            ),
        ),
        Panel(
            "Answers",
            "ops",
            (
                (rate("baton_router_answers_total", ROUTER, "reason"), "{{reason}}"),
                (rate("baton_router_aborted_total", ROUTER), "ended by an operator"),
            ),
        ),
        Panel(
            "Running, and queued in the router",
            "short",
            (
                (total("baton_router_requests_running", ROUTER, "pod"), "{{pod}}"),
                (total("baton_router_requests_queued", ROUTER, "pod"), "{{pod}} queued"),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            (
                (rate("baton_router_prompt_tokens_sum", ROUTER), "prompt/s"),
                (rate("baton_router_cached_prompt_tokens_total", ROUTER), "prompt from cache/s"),
                (rate("baton_router_expected_cached_tokens_total", ROUTER), "thought to be on the decode worker/s"),
                (rate("baton_router_output_tokens_sum", ROUTER), "answer/s"),
            ),
        ),
        Panel("Time to first token", "s", quantiles("baton_router_time_to_first_token_seconds", ROUTER)),
        Panel("Time per output token", "s", quantiles("baton_router_time_per_output_token_seconds", ROUTER)),
        Panel(
            "Latency targets",
            "reqps",
            (
                (
                    rate("baton_router_slo_requests_total", ROUTER, "class, ttft, tpot"),
                    "{{class}}: first token {{ttft}}, others {{tpot}}",
                ),
                (rate("baton_router_goodput_requests_total", ROUTER, "class"), "{{class}}: goodput"),
                (rate("baton_router_goodput_tokens_total", ROUTER, "class"), "{{class}}: tokens in time/s"),
                (
                    rate("baton_router_late_requests_total", ROUTER, "outcome, reason"),
                    "first token cannot be in time ({{reason}}): {{outcome}}",
                ),
            ),
            "Answers that met or missed their targets, for the first token and for the others. Goodput: all were met. "
            "Too late by prediction: refused, or served all the same (--slo-late).",
        ),
        Panel(
            "Endpoint picker",
            "reqps",
            (
                (rate("baton_router_picks_total", ROUTER, "outcome"), "asked by a Gateway: {{outcome}}"),
                (rate("baton_router_picks_served_total", ROUTER, "by"), "served by: {{by}}"),
                (rate("baton_router_picked_requests_total", ROUTER, "outcome"), "came with workers: {{outcome}}"),
            ),
            "What was answered to a Gateway (workers: with the pair), which endpoint served it then, and whether the "
            "router that got it followed the choice.",
        ),
        Panel("Endpoint picker's time", "s", quantiles("baton_router_pick_seconds", ROUTER)),
        Panel("Whole request", "s", quantiles("baton_router_request_seconds", ROUTER)),
        Panel(
            "Where answers spend their time",
            "short",
            ((rate("baton_router_stage_seconds_total", ROUTER, "stage"), "{{stage}}"),),
            "Seconds in each second: how many answers are in this stage at a time, on average.",
        ),
        Panel(
            "Measured, divided by predicted",
            "short",
            quantiles_by("of", "baton_router_measured_to_predicted_ratio", ROUTER),
            "Until the first token, and between two tokens, as routing decisions predict them. 1 is right.",
        ),
        Panel(
            "Recoveries",
            "ops",
            (
                (rate("baton_router_retries_total", ROUTER, "reason"), "retry: {{reason}}"),
                (rate("baton_router_migrations_total", ROUTER, "reason"), "migration: {{reason}}"),
                (rate("baton_router_fallbacks_total", ROUTER), "KV computed again"),
                (rate("baton_router_retries_refused_total", ROUTER), "retry budget spent"),
                (
                    rate("baton_router_spares_withheld_total", ROUTER),
                    "no spare prefill worker named, for the same reason",
                ),
                (rate("baton_router_suspensions_total", ROUTER, "reason"), "a worker left alone: {{reason}}"),
                (rate("baton_router_false_workers_total", ROUTER, "about"), "a worker said what cannot be: {{about}}"),
                (rate("baton_router_block_resyncs_total", ROUTER), "a worker's blocks asked for anew"),
                (rate("baton_router_process_restarts_total", ROUTER), "a process of a router started again"),
            ),
            "Nobody notices these but in latency; a spent retry budget is an error that a client saw.",
        ),
        Panel(
            "Workers that routers see",
            "short",
            (
                (f"max by (role, state) (baton_router_endpoints{{{ROUTER}}})", "{{role}} {{state}}"),
                (f"sum (baton_router_paused{{{ROUTER}}})", "routers that are paused"),
            ),
        ),
        Panel(
            "Refused, and files read again",
            "ops",
            (
                (rate("baton_router_unauthenticated_total", ROUTER, "interface"), "no API key: {{interface}}"),
                (rate("baton_router_refused_total", ROUTER, "limit"), "limit reached: {{limit}}"),
                (rate("baton_file_reloads_total", ALL, "what, outcome"), "{{what}}: {{outcome}}"),
            ),
        ),
        Panel(
            "Spans of traces",
            "ops",
            ((rate("baton_trace_spans_total", ALL, "outcome"), "{{outcome}}"),),
            "What is made and neither sent nor failed was dropped, because too many waited.",
        ),
        Panel(
            "Tasks of routers' and workers' event loops",
            "short",
            ((total("baton_process_tasks", ALL, "pod"), "{{pod}}"),),
        ),
    ],
    "Prefill": [
        Panel(
            "Queued prompt tokens", "short", ((total("baton_worker_queued_prompt_tokens", PREFILL, "pod"), "{{pod}}"),)
        ),
        Panel(
            "Prompt tokens",
            "short",
            (
                (rate("baton_worker_prompt_tokens_total", PREFILL, "pod"), "{{pod}} /s"),
                (rate("baton_worker_cached_prompt_tokens_total", PREFILL, "pod"), "{{pod}} from cache/s"),
            ),
        ),
        Panel("Requests running", "short", ((total("baton_worker_requests_running", PREFILL, "pod"), "{{pod}}"),)),
        Panel("Leases", "short", ((total("baton_worker_leases", PREFILL, "pod"), "{{pod}}"),)),
        Panel("Queueing", "s", quantiles("baton_worker_queue_seconds", PREFILL)),
        Panel(
            "KV blocks",
            "short",
            ((total("baton_worker_kv_blocks", PREFILL, "state"), "{{state}}"),),
        ),
        Panel("Streams", "ops", ((rate("baton_worker_streams_total", PREFILL, "code"), "{{code}}"),)),
    ],
    "Decode": [
        Panel(
            "Requests",
            "short",
            (
                (total("baton_worker_requests_running", DECODE, "pod"), "{{pod}} running"),
                (total("baton_worker_requests_waiting", DECODE, "pod"), "{{pod}} waiting"),
            ),
        ),
        Panel(
            "KV in use",
            "percentunit",
            (
                (
                    f'sum by (pod) (baton_worker_kv_blocks{{{DECODE},state="owned"}}) / '
                    f"sum by (pod) (baton_worker_kv_blocks{{{DECODE}}})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel("Tokens of answers", "short", ((rate("baton_worker_output_tokens_total", DECODE, "pod"), "{{pod}} /s"),)),
        Panel(
            "Where prompts were computed",
            "ops",
            ((rate("baton_worker_prompts_total", DECODE, "place"), "{{place}}"),),
            "As decode workers decided in the end, who see what is missing.",
        ),
        Panel("Preemptions", "ops", ((rate("baton_worker_preemptions_total", DECODE, "pod"), "{{pod}}"),)),
        Panel(
            "Steps given up",
            "ops",
            ((rate("baton_worker_steps_given_up_total", WORKERS, "reason"), "{{reason}}"),),
            "Steps that ended early, between two layers: their requests had all ended (clients left, batches made way) "
            "or a request came whose target would not have held after them.",
        ),
        Panel(
            "Too late for their targets",
            "ops",
            ((rate("baton_worker_late_requests_total", WORKERS, "outcome, cause"), "{{outcome}}, {{cause}}"),),
            "Waiting requests that could not meet their latency targets any more: refused, or served as best effort. "
            "By cause: late even alone, or after others that they would make late.",
        ),
        Panel(
            "Workers that go by slack",
            "short",
            ((f"sum by (container) (baton_worker_goes_by_slack{{{WORKERS}}})", "{{container}}"),),
            "They have requests with latency targets, and know how long steps take (--queue-policy auto); or always go "
            "by slack (slo).",
        ),
        Panel(
            "Drafted tokens",
            "ops",
            ((rate("baton_worker_draft_tokens_total", DECODE, "outcome"), "{{outcome}}"),),
            "Tokens of answers that were guessed ahead (--speculation), by whether the model drew the same.",
        ),
        Panel("Queueing", "s", quantiles("baton_worker_queue_seconds", DECODE)),
        Panel("Streams", "ops", ((rate("baton_worker_streams_total", DECODE, "code"), "{{code}}"),)),
        Panel(
            "Prefill that failed under a decode worker",
            "ops",
            ((rate("baton_worker_prefill_failures_total", DECODE, "code"), "{{code}}"),),
        ),
        Panel(
            "Prefill asked twice (hedges)",
            "ops",
            (
                (rate("baton_worker_hedges_total", DECODE, "outcome"), "{{outcome}}"),
                (rate("baton_worker_hedges_won_total", DECODE), "won"),
            ),
        ),
    ],
    "KV plane": [
        Panel(
            "Error of the model of time",
            "percentunit",
            (
                (f'max by (pod) (baton_worker_step_time_error_ratio{{{WORKERS},percentile="90"}})', "{{pod}} p90"),
                (f"max by (pod) (baton_worker_step_time_drifts{{{WORKERS}}})", "{{pod}} drifts"),
            ),
            "What workers predict their latest steps wrong by. 100 % drifts: steps take other times all the time.",
        ),
        Panel("Bytes moved", "Bps", ((rate("baton_worker_kv_bytes_moved_total", WORKERS, "pod"), "{{pod}}"),)),
        Panel(
            "Blocks",
            "ops",
            (
                (rate("baton_worker_kv_blocks_moved_total", WORKERS), "moved"),
                (rate("baton_worker_kv_blocks_lost_total", WORKERS), "lost"),
            ),
        ),
        Panel(
            "Handoff that is exposed",
            "s",
            quantiles("baton_worker_handoff_seconds", DECODE),
            "From the first token at a decode worker to the last KV block there.",
        ),
        Panel("KV computed again", "ops", ((rate("baton_worker_fallbacks_total", DECODE, "pod"), "{{pod}}"),)),
        Panel(
            "KV found, by tier",
            "ops",
            ((rate("baton_worker_kv_cache_hits_total", WORKERS, "tier"), "{{tier}}"),),
            "KV blocks of prompts that nobody had to compute, by where they were found.",
        ),
        Panel(
            "KV between tiers",
            "ops",
            ((rate("baton_worker_kv_tier_moves_total", WORKERS, "move"), "{{move}}"),),
            "Dropped blocks were evicted before the store had taken them.",
        ),
        Panel(
            "Cut, refused and hung",
            "ops",
            (
                (rate("baton_worker_streams_cut_total", WORKERS, "service"), "{{service}} stream cut by a drain"),
                (rate("baton_worker_streams_unread_total", WORKERS), "stream ended, as nobody read it"),
                (rate("baton_worker_requests_refused_total", WORKERS), "request refused, as too many wait"),
                (rate("baton_worker_engine_hangs_total", WORKERS), "engine killed, as it hung"),
            ),
        ),
        Panel("Bytes in a store of files", "bytes", ((f"max(baton_kv_store_bytes{{{WORKERS}}})", "bytes"),)),
        Panel(
            "Store of files",
            "ops",
            (
                (rate("baton_kv_store_failed_blocks_total", WORKERS), "blocks that failed"),
                (rate("baton_kv_store_evicted_runs_total", WORKERS), "runs evicted"),
            ),
        ),
        Panel(
            "Prompt tokens found in a cache",
            "percentunit",
            (
                (
                    f"{rate('baton_router_cached_prompt_tokens_total', ROUTER)} / "
                    f"{rate('baton_router_prompt_tokens_sum', ROUTER)}",
                    "share",
                ),
            ),
        ),
    ],
    "Autoscaler": [
        Panel(
            "Workers",
            "short",
            (
                (newest("baton_desired_replicas", "role"), "{{role}} desired"),
                (newest("baton_needed_replicas", "role"), "{{role}} needed"),
                (newest("baton_advised_replicas", "role"), "{{role}} advised"),
                (newest("baton_autoscaler_workers", "role, state"), "{{role}} {{state}}"),
            ),
        ),
        Panel(
            "What prefill scales by",
            "short",
            (
                (newest("baton_prefill_queued_tokens"), "queued prompt tokens"),
                (newest("baton_prefill_arrival_tokens_per_second"), "prompt tokens/s that arrive"),
            ),
        ),
        Panel(
            "What decode scales by",
            "short",
            (
                (newest("baton_decode_requests"), "requests"),
                (newest("baton_decode_kv_used_pods"), "workers' worth of KV"),
            ),
        ),
        Panel(
            "Changes",
            "ops",
            (
                (rate("baton_autoscaler_scalings_total", AUTOSCALER, "role, direction"), "{{role}} {{direction}}"),
                (rate("baton_autoscaler_role_shifts_total", AUTOSCALER, "role"), "to {{role}}"),
            ),
        ),
        Panel(
            "Refused by the cluster",
            "ops",
            ((rate("baton_autoscaler_failures_total", AUTOSCALER, "action"), "{{action}}"),),
        ),
        Panel(
            "Leader, and requests held for a first worker",
            "short",
            (
                (total("baton_autoscaler_leads", AUTOSCALER, "pod"), "{{pod}} leads"),
                (newest("baton_autoscaler_held_requests"), "held"),
            ),
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(row):
            x = index % COLUMNS * (WIDTH // COLUMNS)
            place = {"x": x, "y": y + index // COLUMNS * HEIGHT, "w": WIDTH // COLUMNS, "h": HEIGHT}
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "timeseries",
                    "title": panel.title,
                    "description": panel.description,
                    "datasource": datasource,
                    "gridPos": place,
                    "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                    "options": {"legend": {"showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"}},
                    "targets": [
                        {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}
                        for number, (expr, legend) in enumerate(panel.queries)
                    ],
                }
            )
        y += -(-len(row) // COLUMNS) * HEIGHT
    namespaces = "label_values(baton_router_requests_running, namespace)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "datasource": datasource,
            "query": {"query": namespaces, "refId": "namespace"},
            "definition": namespaces,
            "refresh": 2,
            "label": "Namespace",
        },
    ]
    return {
        "uid": "baton",
        "title": "Baton",
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main("tools.dashboard", __doc__, PATH, text()))
