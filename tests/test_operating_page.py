"""docs/operating.md names nothing that there is not: metrics, panels, log lines, settings, commands, other pages."""

from __future__ import annotations

import re
from pathlib import Path

import click
from prometheus_client import Counter, Gauge, Histogram

from baton.cli.main import GROUP
from baton.settings import SETTINGS, flag_name
from common import metrics
from tools import dashboard

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/operating.md").read_text()
SYMPTOMS = re.split(r"^### ", TEXT, flags=re.M)[1:]
SOURCES = ("common", "decode_service", "engine", "kv_store", "prefill_service", "router", "worker")
KINDS = ("Look at", "Log", "Ask", "Turn")


def quoted(text: str, pattern: str) -> set[str]:
    return {one for code in re.findall(r"`([^`\n]+)`", text) for one in re.findall(pattern, code)}


def test_there_are_twenty_symptoms_each_with_what_to_look_at_and_to_turn() -> None:
    assert len(SYMPTOMS) >= 20
    for symptom in SYMPTOMS:
        assert re.findall(r"^- \*\*([^*]+)\*\*: ", symptom, flags=re.M) == list(KINDS), symptom.splitlines()[0]


def test_metrics_exist() -> None:
    suffixes: dict[type, tuple[str, ...]] = {
        Counter: ("_total",),
        Gauge: ("",),
        Histogram: ("", "_bucket", "_sum", "_count"),
    }
    known = {
        one._name + suffix
        for one in vars(metrics).values()
        if isinstance(one, Counter | Gauge | Histogram)
        for suffix in suffixes[type(one)]
    }
    named = quoted(TEXT, r"baton_[a-z_]+")
    assert len(named) > 30
    assert named <= known, named - known


def test_every_alert_has_its_symptom() -> None:
    rules = re.findall(r"alert: (\w+)", (ROOT / "helm/files/alerts.yaml").read_text())
    assert quoted(TEXT, r"^Baton[A-Z]\w+$") == set(rules)


def test_panels_exist() -> None:
    known = {f"{row} / {panel.title}" for row, panels in dashboard.ROWS.items() for panel in panels}
    named = set(re.findall(r"\*([A-Z][A-Za-z ]+ / [^*\n]+)\*", TEXT))
    assert len(named) > 15
    assert named <= known, named - known


def test_settings_and_commands_exist() -> None:
    flags = {flag_name(field) for settings in SETTINGS.values() for field in settings.model_fields}
    flags |= {option for command in GROUP.commands.values() for one in command.params for option in one.opts}
    flags |= {f"--no-{flag.removeprefix('--')}" for flag in flags}
    named = quoted(TEXT, r"(?<![\w-])--[a-z][a-z-]+")
    assert len(named) > 20
    assert named <= flags, named - flags
    commands = quoted(TEXT, r"^baton ([a-z]+)")
    known = set(GROUP.list_commands(click.Context(GROUP)))
    assert commands <= known, commands - known


def test_log_lines_exist() -> None:
    source = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    lines = re.findall(r"^- \*\*Log\*\*: (.*?)(?=^- \*\*|^$)", TEXT, flags=re.M | re.S)
    named = {code for line in lines for code in re.findall(r"`([^`\n]+)`", line) if not code.startswith("--")}
    assert len(named) > 15
    missing = {name for name in named if f'"{name}' not in source}
    assert not missing


def test_other_pages_exist() -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)", TEXT):
        path = (ROOT / "docs" / target).resolve()
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)
            anchors = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, (target, anchor)
