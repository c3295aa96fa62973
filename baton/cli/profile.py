"""`baton profile`: measures how long steps take on this machine, and keeps a model of it."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path

import click

from baton.cli.options import SettingsCommand
from common.config import EngineSettings

MIN_MINUTES = 0.05


def profile(settings: EngineSettings, *, minutes: float, out: str | None) -> int:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from common.batch_time_file import encode
    from common.model_files import open_model
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
    name = hashlib.blake2b(repr(sorted(asdict(made.time.key).items())).encode(), digest_size=8).hexdigest()
    path = Path(out) if out else Path(settings.cache_dir) / f"batch-time-{name}.json"
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


PROFILE = SettingsCommand(
    "profile",
    EngineSettings,
    profile,
    about="Learns how long steps take with this model on this machine, and keeps what it learned.",
    examples=["baton profile", "baton profile --minutes 10 --dtype bfloat16", "baton profile --out here.json"],
    params=[
        click.Option(
            ["--minutes"], type=click.FloatRange(min=MIN_MINUTES), default=4.0, show_default=True, help="how long"
        ),
        click.Option(["--out"], metavar="FILE", help="where the model goes; a file in --cache-dir if unset"),
    ],
)
