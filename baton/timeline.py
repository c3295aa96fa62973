"""Draws where the time of one request went, for a terminal.

      queue          0.4 ms  ▏
      prefill       41.2 ms  ███████████
      handoff        3.1 ms             ▉
      first decode  22.0 ms              ██████
      decode       180.0 ms                    █████████████████████████
      total        246.7 ms  first token after 42.1 ms, 41.2 tokens/s

Each bar starts where the one above ends. `decode` is what follows the second token.
"""

from __future__ import annotations

import textwrap
import time

from baton.client.report import RequestReport, Usage
from common.finished_request import FinishedRequest
from common.targets import LatencyTargets
from common.types import FinishReason

_NAME_WIDTH = 12
_STAGE_WIDTH = 15
_TIME_WIDTH = 12
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MET = {True: "met", False: "missed", None: "not known"}
_ASCII = str.maketrans({"→": "->", "·": "-", "█": "#", **dict.fromkeys(_EIGHTHS[1:8], "#")})


def render_timeline(
    report: RequestReport,
    usage: Usage,
    finish_reason: FinishReason | None = None,
    *,
    width: int = 80,
    ascii_only: bool = False,
) -> str:
    """Lines of at most `width` characters, without a newline at the end. No colours."""
    timings = report.timings
    parts = [
        ("queue", timings.queue_ms),
        ("prefill", timings.prefill_ms),
        ("handoff", timings.handoff_ms),
        *([("tail", timings.tail_ms)] if report.num_tail_tokens else []),
        ("first decode", timings.first_decode_ms),
    ]
    parts.append(("decode", max(0.0, timings.total_ms - sum(ms for _, ms in parts))))
    span = max(timings.total_ms, sum(ms for _, ms in parts))
    left = 2 + _NAME_WIDTH + _TIME_WIDTH + 2
    lines = []
    start = 0.0
    for name, ms in parts:
        bar = _bar(start, start + ms, span, width - left)
        lines.append(f"{_label(name, ms)}  {bar}".rstrip())
        start += ms
    speed = f", {timings.tokens_per_second:.1f} tokens/s" if timings.tokens_per_second > 0 else ""
    lines.append(f"{_label('total', timings.total_ms)}  first token after {_ms(timings.ttft_ms)}{speed}")
    for fact in _facts(report, usage, finish_reason):
        lines += textwrap.wrap(fact, width, initial_indent="  ", subsequent_indent="    ")
    text = "\n".join(line[:width] for line in lines)
    return text.translate(_ASCII) if ascii_only else text


def render_stages(request: FinishedRequest, *, width: int = 80, ascii_only: bool = False) -> str:
    """The timeline of a request that ended, as a router tells it: each stage with whose time it was."""
    left, right = 2 + _STAGE_WIDTH + _TIME_WIDTH + 2, max((len(one.where) for one in request.stages), default=0) + 2
    came = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.time))
    ended = f"{request.status}, {request.finish_reason or request.reason}".rstrip(", ")
    lines = textwrap.wrap(f"{request.request_id}: {request.operation} {request.model}, {came}, {ended}", width)
    for stage in request.stages:
        bar = _bar(stage.start_ms, stage.end_ms, request.total_ms, max(width - left - right, 8))
        label = f"  {stage.name:<{_STAGE_WIDTH}}{_ms(stage.end_ms - stage.start_ms):>{_TIME_WIDTH}}"
        lines.append(f"{label}  {stage.where:<{right}}{bar}".rstrip())
    first = "no token came" if request.ttft_ms is None else f"first token after {_ms(request.ttft_ms)}"
    speed = f", {request.tokens_per_second:.1f} tokens/s" if request.tokens_per_second > 0 else ""
    lines.append(f"  {'total':<{_STAGE_WIDTH}}{_ms(request.total_ms):>{_TIME_WIDTH}}  {first}{speed}")
    lines.append(
        f"  {request.prompt_tokens} prompt tokens ({request.cached_tokens} cached), {request.output_tokens} tokens"
    )
    targets = LatencyTargets(request.ttft_target_ms, request.tpot_target_ms)
    for words in _of_slo(request.slo_class, targets, request.ttft_met, request.tpot_met, request.tpot_ms):
        lines += textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ")
    for attempt in request.attempts:
        if attempt.failure or attempt.cause != "new":
            fact = f"{attempt.cause} on {attempt.decode_worker} after {_ms(attempt.start_ms)}"
            words = f"{fact}: {attempt.failure}" if attempt.failure else fact
            lines += textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ")
    if request.fallback_reason:
        words = f"computed in place: {request.fallback_reason}"
        lines += textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ")
    if request.trace_id:
        lines.append(f"  trace {request.trace_id}")
    text = "\n".join(lines)
    return text.translate(_ASCII) if ascii_only else text


def _label(name: str, ms: float) -> str:
    return f"  {name:<{_NAME_WIDTH}}{_ms(ms):>{_TIME_WIDTH}}"


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def _bar(start: float, stop: float, span: float, columns: int) -> str:
    """`columns` wide at most; an eighth of a column is the smallest thing drawn, and nothing takes nothing."""
    if span <= 0 or stop <= start:
        return ""
    first = round(start / span * columns * 8)
    last = max(first + 1, round(stop / span * columns * 8))
    first, last = min(first, columns * 8 - 1), min(last, columns * 8)
    blank, length = first // 8, last - first // 8 * 8  # left edges are whole columns: there are no right-aligned blocks
    full, rest = divmod(length, 8)
    return " " * blank + "█" * full + (_EIGHTHS[rest] if rest else "")


def _facts(report: RequestReport, usage: Usage, finish_reason: FinishReason | None) -> list[str]:
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    ended = f", ended by {finish_reason.value}" if finish_reason else ""
    lines = [f"{usage.prompt_tokens} prompt tokens{cached} → {usage.completion_tokens} tokens{ended}"]
    decode = report.decode_worker or "unknown"
    if report.prefill_worker:
        size = f"{report.num_bytes_moved / 1e6:.1f} MB"
        lines.append(f"prefill on {report.prefill_worker} → decode on {decode}")
        transfer = f"; {_ms(report.timings.transfer_ms)} of the handoff" if report.timings.transfer_ms > 0 else ""
        lines.append(f"{report.num_blocks_moved} KV blocks moved, {size}{transfer}")
        if report.num_tail_tokens:
            lines.append(f"the last {report.num_tail_tokens} prompt tokens computed on {decode}")
        if report.num_blocks_lent:
            lines.append(f"{report.num_blocks_lent} KV blocks lent to the prefill worker")
    else:
        lines.append(f"prefill and decode on {decode}")
    if report.fallback_reason:
        lines.append(f"computed in place: {report.fallback_reason}")
    if (slo := report.slo) is not None:
        targets = slo.targets or LatencyTargets()
        lines += _of_slo(slo.slo_class, targets, slo.ttft_met, slo.tpot_met, slo.tpot_ms)
    if report.num_drafted_tokens:
        lines.append(f"{report.num_accepted_tokens} of {report.num_drafted_tokens} drafted tokens were right")
    counts = [("retries", report.num_retries), ("migrations", report.num_migrations)]
    counts += [("hedges", report.num_hedges), ("hedges won", report.num_hedges_won)]
    counts.append(("preemptions", report.num_preemptions))
    notable = ", ".join(f"{name}: {count}" for name, count in counts if count)
    return [*lines, notable] if notable else lines


def _of_slo(
    slo_class: str, targets: LatencyTargets, ttft_met: bool | None, tpot_met: bool | None, tpot_ms: float | None
) -> list[str]:
    """What became of the latency targets, in a line; none if there were no targets and no class."""
    facts = [f"class {slo_class}"] if slo_class else []
    if targets.ttft_ms is not None:
        facts.append(f"first token within {_ms(targets.ttft_ms)}: {_MET[ttft_met]}")
    if targets.tpot_ms is not None:
        took = "" if tpot_ms is None else f" ({_ms(tpot_ms)})"
        facts.append(f"{_ms(targets.tpot_ms)} a token: {_MET[tpot_met]}{took}")
    return [f"latency targets: {', '.join(facts)}"] if facts else []
