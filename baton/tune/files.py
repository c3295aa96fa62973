"""The files that hold what was found: for `baton up`, for single workers and routers, and for the chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from baton.settings import UP_SETTINGS, WORKER_SETTINGS, RouterCommandSettings
from baton.tune.knobs import ROLES, Config
from baton.tune.trials import Trials
from common.config import ConnectorSettings, TuneSettings
from common.errors import StartupError

UP, WORKER, ROUTER, VALUES, REPORT = "up.yaml", "worker.yaml", "router.yaml", "values.yaml", "report.html"
_ROLES = {"prefill", "decode", "both"}
_OF_CONNECTORS = ConnectorSettings.model_fields.keys()
_WITHOUT_TARGETS = ("fcfs", "priority")  # queue policies that look at none


def check_folder(settings: TuneSettings) -> Path:
    """The folder, made if it is missing: better known before an hour of work. Raises `StartupError`."""
    folder = Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--out: {folder} cannot be made: {error.strerror}") from error
    return folder


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Raises `StartupError`."""
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StartupError(f"{folder / name} cannot be written: {error.strerror}") from error


def settings_files(trials: Trials, config: Config, told: str) -> dict[str, str]:
    """By name. `told`: a line about what was found."""
    found = settings_of(trials, config)
    targets = router_targets(trials, config)
    variables = "".join(f"BATON_{name.upper()}={ms:g} " for name, ms in targets.items())
    heads = {
        UP: f"{variables}baton up --config {UP}",
        WORKER: f"baton prefill --config {WORKER} (decode and worker likewise)",
        ROUTER: f"baton router --config {ROUTER}",
        VALUES: f"helm install baton helm -f {VALUES}. Delete `autoscaling` if the chart is to scale the workers",
    }
    documents: dict[str, object] = {
        UP: {name: value for name, value in found.items() if name in UP_SETTINGS.model_fields},
        WORKER: _of_worker(found),
        ROUTER: _of_router(found) | targets,
        VALUES: chart_values(found, targets),
    }
    return {
        name: f"# Found by baton tune. {told}\n# {heads[name]}\n{yaml.safe_dump(document, sort_keys=False)}"
        for name, document in documents.items()
    }


def settings_of(trials: Trials, config: Config) -> dict[str, object]:
    """All that was chosen, and all that was given and decides what it is worth, by setting."""
    named: dict[str, object] = {**trials.space.named(config)}
    del named[ROLES]
    roles, settings = trials.space.roles(config), trials.settings
    given = {
        name: getattr(settings, name)
        for name in sorted(settings.model_fields_set)
        if name in UP_SETTINGS.model_fields and name not in {*_ROLES, "model", "cache_dir"}
    }
    workers = {"prefill": roles.prefill, "decode": roles.decode, "both": roles.both}
    return {name: value for name, value in (workers | given | named).items() if value is not None}


def router_targets(trials: Trials, config: Config) -> dict[str, float]:
    """Of requests that bring none, if workers go by targets."""
    if trials.space.named(config)["queue_policy"] in _WITHOUT_TARGETS:
        return {}
    return {f"slo_{name}_ms": trials.goodput[name] for name in ("ttft", "tpot") if name in trials.goodput}


def chart_values(found: Mapping[str, object], targets: Mapping[str, float]) -> dict[str, object]:
    connectors = {name: value for name, value in found.items() if name in _OF_CONNECTORS}
    worker = {name: value for name, value in _of_worker(found).items() if name not in _OF_CONNECTORS}
    values: dict[str, object] = {
        role: {"replicas": found[role], **({"settings": dict(worker)} if found[role] else {})}
        for role in ("prefill", "decode", "both")
    }
    values["router"] = {"settings": _of_router(found) | dict(targets)}
    if connectors:
        values["kv"] = {"settings": connectors}
    return values | {"autoscaling": {"mode": "none"}}


def _of_worker(found: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in found.items() if name in WORKER_SETTINGS.model_fields}


def _of_router(found: Mapping[str, object]) -> dict[str, object]:
    known = RouterCommandSettings.model_fields.keys() - _ROLES  # which are addresses there
    return {name: value for name, value in found.items() if name in known}
