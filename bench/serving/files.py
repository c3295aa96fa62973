"""What a run leaves: one JSON object, a line of CSV for each request, an HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.kv.machine import describe_machine
from bench.serving.endpoint import Target
from bench.serving.figures import Json, number
from bench.serving.measure import Measured, MeasureSettings
from bench.serving.outcome import Ending, Outcome
from bench.serving.page import page
from common.errors import ConfigError, StartupError
from common.version import VERSION

ENDINGS = (".json", ".csv", ".html")
COLUMNS = (
    "repeat", "number", "is_warm_up", "ending", "due_s", "sent_s", "ended_s", "send_lag_ms", "queue_ms",
    "ttft_ms", "tpot_ms", "e2el_ms", "prompt_tokens", "cached_tokens", "output_tokens", "reason",
)  # fmt: skip


def settings_json(
    target: Target, settings: MeasureSettings, measured: Measured, tokenizer: str | None
) -> dict[str, Json]:
    """How the run was made; the first names are those of `vllm bench serve`."""
    load = settings.load
    made: dict[str, Json] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": target.name,
        "model_id": measured.model,
        "tokenizer_id": tokenizer,
        "num_prompts": load.num_prompts,
        "request_rate": _finite(load.request_rate),
        "burstiness": _finite(load.burstiness),
        "max_concurrency": load.max_concurrency,
        "base_url": target.url,
    }
    for name, value in asdict(load).items():
        shown = "duration_limit" if name == "duration" else name  # `duration` is how long the run took
        made.setdefault(shown, _finite(value) if isinstance(value, float) else value)
    made |= {
        "goodput": dict(settings.targets),
        "num_warmups": settings.num_warmups,
        "warmup_seconds": settings.warmup_seconds,
        "num_repeats": settings.repeats,
        "request_timeout": settings.request_timeout,
        "baton_version": VERSION,
        "client_machine": describe_machine(),
    }
    return made


def _finite(value: float) -> Json:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def detailed_json(outcomes: Sequence[Outcome], *, warm_up_s: float = 0.0) -> dict[str, Json]:
    """Lists with an entry for each request, in the order of sending, under the names of `vllm bench serve
    --save-detailed`. Seconds. What did not complete has 0 and an empty list, and its reason in `errors`.
    `warm_up_s`: what is due before is marked; the figures leave it out."""
    done = [one.ending is Ending.COMPLETED for one in outcomes]
    return {
        "input_lens": [one.prompt_tokens for one in outcomes],
        "output_lens": [one.output_tokens if ok else 0 for one, ok in zip(outcomes, done, strict=True)],
        "ttfts": [one.ttft_s if ok else 0.0 for one, ok in zip(outcomes, done, strict=True)],
        "itls": [[*one.itls_s] if ok else [] for one, ok in zip(outcomes, done, strict=True)],
        "latencies": [one.e2el_s if ok else 0.0 for one, ok in zip(outcomes, done, strict=True)],
        "start_times": [one.due_s for one in outcomes],
        "queue_times": [one.queue_s for one in outcomes],
        "errors": [one.reason for one in outcomes],
        "is_warm_up": [one.due_s < warm_up_s for one in outcomes],
    }


def requests_csv(runs: Sequence[Sequence[Outcome]], *, warm_up_s: float = 0.0) -> str:
    """`warm_up_s`: what is due before is marked; the figures leave it out."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for repeat, outcomes in enumerate(runs, 1):
        for one in outcomes:
            is_done = one.ending is Ending.COMPLETED
            writer.writerow(
                [
                    repeat, one.number, int(one.due_s < warm_up_s), one.ending,
                    _seconds(one.due_s), _seconds(one.sent_s), _seconds(one.ended_s),
                    _ms(one.send_lag_s), _ms(one.queue_s), _ms(one.ttft_s) if one.token_times_s else "",
                    _ms(one.tpot_s) if is_done and one.tpot_s is not None else "", _ms(one.e2el_s) if is_done else "",
                    one.prompt_tokens, one.cached_tokens, one.output_tokens, one.reason,
                ]
            )  # fmt: skip
    return text.getvalue()


def _seconds(value: float) -> str:
    return f"{value:.6f}"


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.3f}"


def check_outputs(paths: Sequence[str], endings: Sequence[str] = ENDINGS) -> None:
    """Before anything is measured. Raises `ConfigError`."""
    for path in paths:
        if Path(path).suffix not in endings:
            raise ConfigError("--output", f"{path!r} does not end in {', '.join(endings)}")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError("--output", f"there is no folder {Path(path).absolute().parent}")


def write_outputs(
    paths: Sequence[str], whole: Mapping[str, Json], settings: Mapping[str, Json], measured: Measured
) -> None:
    """`whole` is what JSON gets. Raises `StartupError` if a file cannot be written."""
    for path in paths:
        if path.endswith(".json"):
            text = json.dumps(whole, ensure_ascii=False) + "\n"
        elif path.endswith(".csv"):
            text = requests_csv(measured.runs, warm_up_s=number(settings, "warmup_seconds"))
        else:
            title = f"{measured.model}, {settings.get('label') or settings.get('base_url')}"
            text = page(title, settings, measured.figures, measured.runs)
        write(path, text)


def write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error}") from error
