"""`baton tune`: searches the settings that serve a traffic best, by simulation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from baton.cli.options import AS_JSON, SettingsCommand
from baton.cli.simulate import undisturbed
from baton.settings import TUNE_SETTINGS
from common.config import TuneSettings

if TYPE_CHECKING:
    from baton.tune.tuning import Finalist, KnobFound, Progress, Tuned


def tune(settings: TuneSettings, *, targets: tuple[str, ...], as_json: bool) -> int:
    """1 if a real run failed."""
    from baton.tune import confirm, files
    from baton.tune.report import headline, page
    from baton.tune.tuning import tune as find

    settings = settings.model_copy(update={"goodput": (*settings.goodput, *targets)})
    confirmation = None
    if settings.confirm:
        from baton.cli.serve import prepare_model
        from common.logs import setup_logging

        confirm.check(settings)
        setup_logging("tune", level="warning", log_format="text")
        confirmation = confirm.Confirmation(settings, prepare_model)
    folder = files.check_folder(settings)
    with _progress_bar(settings) as progress, undisturbed():
        tuned = find(settings, confirm=confirmation, progress=progress)
    told = headline(tuned)
    texts = files.settings_files(tuned.trials, tuned.chosen.config, told)
    files.write(folder, {**texts, files.REPORT: page(tuned)})
    if as_json:
        click.echo(json.dumps(as_object(tuned), indent=1))
    else:
        _print(tuned)
        click.echo(f"{told}\nwritten to {folder}: {', '.join([*texts, files.REPORT])}")
    is_failed = any(one.confirmed is not None and one.confirmed.good_share is None for one in tuned.finalists)
    return 1 if is_failed else 0


@contextmanager
def _progress_bar(settings: TuneSettings) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("defaults", total=1.0)
        yield lambda what, share: bar.update(
            task, description=f"{what}, {settings.minutes:g} minutes at most", completed=share
        )


def as_object(tuned: Tuned) -> dict[str, object]:
    """What `--json` prints (docs/tune.md)."""
    from baton.tune.report import held_rates, hints

    settings = tuned.trials.settings
    held, held_by_default = held_rates(tuned)
    return {
        "goodput_targets": dict(tuned.trials.goodput),
        "requests": settings.requests,
        "load": tuned.load,
        "request_rate": tuned.trials.rate(is_check=True, load=tuned.load),
        "held_rate": held,
        "held_rate_by_default": held_by_default,
        "simulations": len(tuned.trials.done),
        "complete": tuned.is_complete,
        "hints": hints(tuned),
        "times": list(tuned.trials.sources),
        "chosen": _finalist(tuned, tuned.chosen),
        "default": _finalist(tuned, tuned.default),
        "finalists": [_finalist(tuned, one) for one in tuned.finalists],
        "knobs": [_knob(tuned, one) for one in tuned.knobs],
    }


def _finalist(tuned: Tuned, one: Finalist) -> dict[str, object]:
    from baton.tune.files import settings_of

    confirmed = one.confirmed
    return {
        "settings": settings_of(tuned.trials, one.config),
        "good_share": one.check.score.good_share,
        "request_goodput": tuned.goodput(one.check),
        "good_share_at_own_rate": one.own_rate.score.good_share,
        "figures": one.check.figures,
        "confirmed": None
        if confirmed is None
        else {
            "good_share": confirmed.good_share,
            "expected_good_share": confirmed.expected,
            "how": confirmed.how,
            "problem": confirmed.problem,
            "figures": dict(confirmed.figures),
        },
    }


def _knob(tuned: Tuned, one: KnobFound) -> dict[str, object]:
    from baton.tune.report import shown

    alone = one.with_default
    return {
        "name": one.name,
        "chosen": shown(one.chosen),
        "default": shown(one.default),
        "searched": one.is_searched,
        "good_share_with_default": None if alone is None else alone.score.good_share,
        "request_goodput_with_default": None if alone is None else tuned.goodput(alone),
    }


def _print(tuned: Tuned) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from baton.tune.report import KNOB_HEADS, finalist_rows, hints, knob_rows

    console = Console(width=None if sys.stdout.isatty() else 160)
    for heads, rows in ((KNOB_HEADS, [*knob_rows(tuned)]), finalist_rows(tuned)):
        table = Table()
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for source in tuned.trials.sources:
        click.echo(f"times: {source}")
    how = dict.fromkeys(one.confirmed.how for one in tuned.finalists if one.confirmed is not None)
    for what in how:
        click.echo(f"real runs: {what}")
    for hint in hints(tuned):
        click.echo(hint)


TUNE = SettingsCommand(
    "tune",
    TUNE_SETTINGS,
    tune,
    about="Searches the settings that serve a traffic best: roles, chunks, batches, queue and policy, by simulation. "
    "What is given stays as it is.",
    examples=[
        "baton tune --workers 4 --rate 20 --prompt-tokens 1000 --goodput ttft:500 tpot:50",
        "baton tune --workers 8 --trace conversation.jsonl --slo-ttft-ms 1000 --slo-tpot-ms 30 --minutes 10",
        "baton tune --workers 2 --times here.json --rate 1 --goodput ttft:2000 tpot:100 --confirm",
        "baton up --config tuned/up.yaml",
    ],
    params=[click.Argument(["targets"], nargs=-1, metavar="[TARGET]..."), AS_JSON],
)
