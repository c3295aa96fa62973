"""`baton bench latency` and `baton bench throughput`: a model in this process, without a server. What they measure, and
the names in their JSON, are those of vLLM's commands of the same names."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import track

from baton.cli.options import SettingsCommand
from bench.command_line import outcome
from bench.serving.figures import Json
from bench.serving.files import write
from bench.serving.numbers import percentile
from common.config import EngineSettings

if TYPE_CHECKING:
    from baton import LLM

PERCENTS = (10, 25, 50, 75, 90, 99)
_TOKEN_IDS = range(100, 10_000)  # in nearly any vocabulary; no special ones


def measure_latency(
    llm: LLM, *, batch_size: int, input_len: int, output_len: int, num_warmups: int, num_iters: int, seed: int
) -> dict[str, Json]:
    """Seconds until a batch of prompts is answered, all of one length. Each iteration has new prompts, so none is found
    in the prefix cache."""
    draw = random.Random(seed)
    latencies = []
    for iteration in _tracked(num_warmups + num_iters):
        prompts = [draw.choices(_TOKEN_IDS, k=input_len) for _ in range(batch_size)]
        taken_s = _timed(llm, prompts, [output_len] * batch_size)
        if iteration >= num_warmups:
            latencies.append(taken_s)
    ordered = sorted(latencies)
    return {
        "avg_latency": statistics.fmean(latencies),
        "latencies": [*latencies],
        "percentiles": {str(percent): percentile(ordered, percent) for percent in PERCENTS},
    }


def measure_throughput(
    llm: LLM, *, num_prompts: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> dict[str, Json]:
    """All prompts at once, in whatever order is fastest. Lengths are uniform from 1 - `range_ratio` to 1 + that, times
    as long."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(round(mean * draw.uniform(1 - range_ratio, 1 + range_ratio)), 1)

    prompts = [draw.choices(_TOKEN_IDS, k=length(input_len)) for _ in range(num_prompts)]
    lengths = [length(output_len) for _ in prompts]
    _timed(llm, [draw.choices(_TOKEN_IDS, k=input_len)], [2])  # what is made at the first request is not counted
    taken_s = _timed(llm, prompts, lengths)
    num_input, num_output = sum(map(len, prompts)), sum(lengths)
    return {
        "elapsed_time": taken_s,
        "num_requests": num_prompts,
        "total_num_tokens": num_input + num_output,
        "total_output_tokens": num_output,
        "requests_per_second": num_prompts / taken_s,
        "tokens_per_second": (num_input + num_output) / taken_s,
        "output_tokens_per_second": num_output / taken_s,
    }


def _timed(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    from baton import SamplingParams

    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def _tracked(num: int) -> Iterable[int]:
    return track(
        range(num), "iterations", console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    )


_FROM_1 = click.IntRange(min=1)
_JSON = [
    click.Option(["--json", "as_json"], is_flag=True, help="print one JSON object"),
    click.Option(
        ["--output-json"], metavar="FILE", type=click.Path(dir_okay=False, writable=True), help="write it to a file"
    ),
    click.Option(["--seed"], type=int, default=0, show_default=True, help="of the prompts"),
]


def _length(name: str, default: int, text: str) -> click.Option:
    return click.Option([name], metavar="INT", type=_FROM_1, default=default, show_default=True, help=text)


def _run(
    command: str,
    settings: EngineSettings,
    measure: Callable[[LLM], dict[str, Json]],
    *,
    as_json: bool,
    file: str | None,
) -> int:
    """Measures with a model of `settings`, and tells what was found."""
    from baton import LLM
    from baton.offline.llm import OPTIONS

    given = {name: getattr(settings, name) for name in settings.model_fields_set & OPTIONS}

    def run() -> int:
        with LLM(**given) as llm:
            found: dict[str, Json] = {"model_id": settings.model, **measure(llm)}
        text = json.dumps(found, ensure_ascii=False)
        if file is not None:
            write(file, text + "\n")
        if as_json:
            click.echo(text)
        else:
            for name, value in found.items():
                for key, one in value.items() if isinstance(value, dict) else [("", value)]:
                    if not isinstance(one, list):
                        click.echo(
                            f"{name} {key}".strip() + f": {one:.6g}" if isinstance(one, float) else f"{name}: {one}"
                        )
        return 0

    return outcome(command, run)


def latency(
    settings: EngineSettings,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iters_warmup: int,
    num_iters: int,
    as_json: bool,
    output_json: str | None,
    seed: int,
) -> int:
    def measure(llm: LLM) -> dict[str, Json]:
        return measure_latency(
            llm,
            batch_size=batch_size,
            input_len=input_len,
            output_len=output_len,
            num_warmups=num_iters_warmup,
            num_iters=num_iters,
            seed=seed,
        )

    return _run("latency", settings, measure, as_json=as_json, file=output_json)


def throughput(
    settings: EngineSettings,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    random_range_ratio: float,
    as_json: bool,
    output_json: str | None,
    seed: int,
) -> int:
    def measure(llm: LLM) -> dict[str, Json]:
        return measure_throughput(
            llm,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            range_ratio=random_range_ratio,
            seed=seed,
        )

    return _run("throughput", settings, measure, as_json=as_json, file=output_json)


LATENCY = SettingsCommand(
    "latency",
    EngineSettings,
    latency,
    about="How long one batch of prompts takes, in this process.",
    examples=["baton bench latency", "baton bench latency --batch-size 1 --input-len 512 --output-len 32 --json"],
    params=[
        _length("--batch-size", 8, "prompts"),
        _length("--input-len", 32, "tokens of each prompt"),
        _length("--output-len", 128, "tokens of each answer"),
        click.Option(
            ["--num-iters-warmup"], type=click.IntRange(min=0), default=3, show_default=True, help="not counted"
        ),
        _length("--num-iters", 10, "batches, one after another"),
        *_JSON,
    ],
)
THROUGHPUT = SettingsCommand(
    "throughput",
    EngineSettings,
    throughput,
    about="How fast many prompts are answered, all at once, in this process.",
    examples=[
        "baton bench throughput --num-prompts 200",
        "baton bench throughput --input-len 512 --output-len 64 --json",
    ],
    params=[
        _length("--num-prompts", 100, "requests"),
        _length("--input-len", 256, "tokens of each prompt"),
        _length("--output-len", 64, "tokens of each answer"),
        click.Option(
            ["--random-range-ratio"],
            type=click.FloatRange(min=0, max=0.99),
            default=0.0,
            show_default=True,
            help="lengths are uniform from 1 - this to 1 + this times as many",
        ),
        *_JSON,
    ],
)
