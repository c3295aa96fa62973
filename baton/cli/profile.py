"""`baton profile`: measures how long steps take on this machine, and keeps a model of it; with `--steps`, shows where
the time of a running worker goes (`baton.cli.profile_worker`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from baton.cli.options import SettingsCommand
from baton.cli.profile_worker import MAX_SECONDS, MAX_STEPS, profile_worker
from baton.settings import ProfileSettings
from common.batch_time import Regime
from common.config import EngineSettings
from common.errors import ConfigError, StartupError

MIN_MINUTES, DEFAULT_MINUTES = 0.05, 4.0
RUN = 100  # steps of a trace that are fitted or held out together


def profile(
    settings: ProfileSettings,
    *,
    minutes: float | None,
    out: str | None,
    traces: tuple[str, ...],
    steps: int | None,
    worker: str | None,
    direct: bool,
    seconds: float | None,
) -> int:
    if steps is not None:
        if minutes is not None or traces:
            raise ConfigError("--steps", "asks a running worker; --minutes and --from are for a model of time")
        if worker is None:
            raise ConfigError("--worker", "is missing: the address of the worker (`baton status` lists them)")
        return profile_worker(settings, worker, num_steps=steps, seconds=seconds, direct=direct, out=out)
    if worker is not None or direct or seconds is not None:
        raise ConfigError("--steps", "is missing: how many steps of the worker to look at")
    minutes = DEFAULT_MINUTES if minutes is None else minutes
    if traces:
        return profile_from(settings, [Path(trace) for trace in traces], out)
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from common.batch_time_file import encode
    from common.model_files import open_model
    from engine.learning.key import model_file
    from engine.loading.embedded_model import ensure_model
    from engine.local.device import LocalDevice
    from engine.profile.profile import PARTS, make_profile, verdict
    from engine.profile.report import page

    folder = open_model(ensure_model(settings.model, settings.cache_dir, click.echo)).path
    device = LocalDevice(folder, settings)
    device.warm_up()
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty()) as bar:
        tasks = {what: bar.add_task(what, total=1.0) for what in PARTS}
        made = make_profile(
            device, settings, minutes=minutes, progress=lambda what, share: bar.update(tasks[what], completed=share)
        )
    path = Path(out) if out else model_file(settings.cache_dir, made.time.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(made.time))
    report = path.with_suffix(".html")
    report.write_text(page(made))
    table = Table(title=f"Errors on steps that were not fitted; a perfect model: {made.noise:.1%}")
    for column in ("steps", "regime", "number", "median", "p95", "bias", "plain formula: median", "p95"):
        table.add_column(column, justify="left" if column in ("steps", "regime") else "right")
    for one in made.comparisons:
        ours, plain = one.model, one.quadratic
        cells = (
            f"{ours.median:.1%}",
            f"{ours.p95:.1%}",
            f"{ours.bias:+.1%}",
            f"{plain.median:.1%}",
            f"{plain.p95:.1%}",
        )
        table.add_row(one.what, one.regime, str(ours.num_steps), *cells)
    Console(width=110).print(table)
    for line in verdict(made):
        click.echo(line)
    click.echo(f"model of time: {path}\nreport: {report}")
    return 0


def profile_from(settings: EngineSettings, traces: Sequence[Path], out: str | None) -> int:
    """Fits to steps that workers wrote, without measuring. Every fifth of them in a row is held out, to tell errors."""
    from common.batch_time_file import encode
    from common.batch_time_fit import fit, fit_quadratic, model_errors, quadratic_errors
    from engine.learning.key import model_file
    from engine.learning.step_trace import read_trace

    read = [read_trace(trace) for trace in traces]
    key = read[0][0]
    if others := [str(trace) for trace, (other, _) in zip(traces, read, strict=True) if other != key]:
        raise StartupError(f"{', '.join(others)} is of another model or machine than {traces[0]}")
    runs = [steps[start : start + RUN] for _, steps in read for start in range(0, len(steps), RUN)]
    fitted = [step for index, run in enumerate(runs) for step in run if index % 5 != 4]
    held_out = [step for run in runs[4::5] for step in run]
    try:
        made, quadratic = fit(key, fitted), fit_quadratic(fitted)
    except ValueError as error:
        raise StartupError(str(error)) from error
    path = Path(out) if out else model_file(settings.cache_dir, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(made))
    for regime in Regime:
        if own := [step for step in held_out if step.shape.regime is regime]:
            ours, plain = model_errors(made, own), quadratic_errors(quadratic, own)
            click.echo(
                f"{regime}: {ours.num_steps} steps held out, error median {ours.median:.1%}, p95 {ours.p95:.1%}, "
                f"bias {ours.bias:+.1%}; plain formula: median {plain.median:.1%}, p95 {plain.p95:.1%}"
            )
    click.echo(f"fitted to {len(fitted)} steps\nmodel of time: {path}")
    return 0


PROFILE = SettingsCommand(
    "profile",
    ProfileSettings,
    profile,
    about="Learns how long steps take with this model on this machine, and keeps what it learned; with --steps, shows "
    "where the time of a running worker goes.",
    examples=[
        "baton profile                                        # a model of time, in 4 minutes",
        "baton profile --minutes 10 --dtype bfloat16",
        "baton profile --from steps.jsonl --out here.json",
        "baton profile --steps 50 --worker 10.0.0.7:50061     # a trace and flame graphs of a worker that serves",
        "baton profile --steps 50 --worker 10.0.0.7:50061 --router 10.0.0.5:50051 --out profiles/",
    ],
    params=[
        click.Option(
            ["--minutes"],
            type=click.FloatRange(min=MIN_MINUTES),
            help=f"model of time: how long to measure  [default: {DEFAULT_MINUTES:g}]",
        ),
        click.Option(
            ["--from", "traces"],
            metavar="FILE",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False),
            help="model of time: fit to what a worker's --step-trace wrote, and measure nothing; may be given several "
            "times",
        ),
        click.Option(
            ["--steps"],
            type=click.IntRange(1, MAX_STEPS),
            help="running worker: trace so many of its next steps with torch's profiler, and draw flame graphs of its "
            "two processes if py-spy is installed there. It goes on serving",
        ),
        click.Option(["--worker"], metavar="HOST:PORT", help="running worker: which, as `baton status` shows it"),
        click.Option(
            ["--direct"], is_flag=True, help="running worker: ask the worker itself, at --worker, and not the router"
        ),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(min=0, min_open=True, max=MAX_SECONDS),
            help="running worker: how long to wait for that many steps  [default: 30]",
        ),
        click.Option(
            ["--out"],
            metavar="PATH",
            help="model of time: its file, in --cache-dir if unset; running worker: the folder for what comes of it, "
            "this one if unset",
        ),
    ],
)
