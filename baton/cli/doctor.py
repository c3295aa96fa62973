"""`baton doctor`: looks at this machine and says what would happen, and what to do."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from baton.cli.options import AS_JSON, SettingsCommand
from baton.settings import UP_SETTINGS
from common.config import UpSettings

if TYPE_CHECKING:
    from baton.doctor.checks import Finding

_MARKS = {"ok": ("✓", "green"), "hint": ("!", "yellow"), "problem": ("✗", "red")}
_ASCII = {"✓": "+", "✗": "x", "→": "->"}
_NAME_WIDTH = 15


def doctor(settings: UpSettings, *, as_json: bool, tune: bool) -> int:
    """Exit code 1 if there is a problem."""
    logging.disable(logging.WARNING)  # what is looked at would log that it is looked at
    try:
        from baton.doctor.checks import Level, examine

        findings = []
        with _progress_bar(is_shown=tune and sys.stderr.isatty()) as progress:
            for finding in examine(settings, tune=tune, progress=progress):
                findings.append(finding)
                if not as_json:
                    print_finding(finding)
    finally:
        logging.disable(logging.NOTSET)
    problems = sum(one.level is Level.PROBLEM for one in findings)
    hints = sum(one.level is Level.HINT for one in findings)
    if as_json:
        print(json.dumps({"problems": problems, "findings": [dataclasses.asdict(one) for one in findings]}))
    else:
        print(f"\n{_count(problems, 'problem')}, {_count(hints, 'hint')}")
    return 1 if problems else 0


@contextmanager
def _progress_bar(*, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Yields what is told the work and the share of it that is done. The bar stands below the findings."""
    if not is_shown:
        yield lambda _what, _share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tune", total=1.0, visible=False)
        yield lambda what, share: bar.update(task, description=f"tune: {what}", completed=share, visible=share < 1.0)


def print_finding(finding: Finding) -> None:
    mark, colour = _MARKS[finding.level]
    click.echo(_plain(f"{click.style(mark, fg=colour)} {finding.name:{_NAME_WIDTH}} {finding.text}"))
    if finding.advice:
        click.echo(_plain(f"  {'':{_NAME_WIDTH}} → {finding.advice}"))


def _plain(line: str) -> str:
    """The line in characters that the terminal can show."""
    if _encoding().startswith("utf"):
        return line
    for sign, ascii_sign in _ASCII.items():
        line = line.replace(sign, ascii_sign)
    return line


def _encoding() -> str:
    return (sys.stdout.encoding or "").lower()


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


DOCTOR = SettingsCommand(
    "doctor",
    UP_SETTINGS,
    doctor,
    about="Looks at this machine: CPU, kernels, GPU, model, connectors, cluster, ports. Takes what `up` takes.",
    examples=[
        "baton doctor",
        "baton doctor --connector nixl --http-port 9000",
        "baton doctor --json",
        "baton doctor --tune",
    ],
    params=[
        AS_JSON,
        click.Option(
            ["--tune"],
            is_flag=True,
            help="measure what makes whole steps of this model fastest, and write it to --cache-dir for engines here",
        ),
    ],
)
