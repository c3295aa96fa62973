"""`baton bench kv`; also `python -m bench.kv`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import click

from bench.command_line import names, outcome
from bench.kv.settings import BenchSettings, Progress, show_progress
from common.config import DEFAULT_MODEL, default_cache_dir
from common.errors import BatonError, ConfigError

PARTS = {  # in the order of running; modules are imported when their part runs
    "handoff": "bench.kv.handoff",
    "control": "bench.kv.control",
    "exposed": "bench.kv.exposed",
    "store": "bench.kv.store_hit",
    "colocated": "bench.kv.colocated",
}
CONNECTORS = ("nixl", "shared_storage", "lmcache")
PICTURES = (".png", ".svg", ".pdf")


def _picture(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:  # noqa: ARG001
    if value is not None and Path(value).suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{value!r} does not end in {', '.join(PICTURES)}")
    return None if value is None else Path(value)


@click.command("kv", short_help="What moving KV costs.", context_settings={"max_content_width": 100})
@click.option("--only", metavar="PART,PART", callback=names(tuple(PARTS)), help=f"parts to run: {', '.join(PARTS)}")
@click.option("--quick", is_flag=True, help="few lengths and repeats: a minute or two a part")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with every sample")
@click.option("--plot", metavar="FILE", callback=_picture, help="draw it, as .png, .svg or .pdf (needs matplotlib)")
@click.option("--connectors", metavar="NAME,NAME", callback=names(CONNECTORS), help="of " + ", ".join(CONNECTORS))
@click.option("--model", metavar="TEXT", default=DEFAULT_MODEL, show_default=True, help="as for baton up")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True)
@click.option("--repeats", metavar="INT", type=click.IntRange(min=1), help="of each measurement  [5; quick: 3]")
@click.option("--seed", metavar="INT", type=int, default=1, show_default=True, help="of prompts and arrivals")
def kv(
    only: tuple[str, ...],
    quick: bool,
    as_json: bool,
    plot: Path | None,
    connectors: tuple[str, ...],
    model: str,
    dtype: str,
    repeats: int | None,
    seed: int,
) -> int:
    """Measures what moving KV costs: handoff against memcpy and raw NIXL, exposed handoff, control plane, store hits,
    and workers of one role each against one of both.

    \b
    Examples:
      baton bench kv --quick
      baton bench kv --only handoff --connectors nixl --json > handoff.json
      baton bench kv --plot kv.svg
    """
    settings = BenchSettings(
        model=model,
        dtype=dtype,
        cache_dir=default_cache_dir(),
        connectors=connectors,
        repeats=repeats or (3 if quick else 5),
        seed=seed,
        quick=quick,
    )
    return outcome("kv", lambda: run(settings, only, show_progress, as_json=as_json, plot=plot))


def run(
    settings: BenchSettings, parts: tuple[str, ...], progress: Progress, *, as_json: bool, plot: Path | None
) -> int:
    """Runs `parts`, prints them, and draws them; 1 if a part failed, which does not keep the others from it.

    Raises `ConfigError` if the picture cannot be drawn here, before anything is measured.
    """
    from bench.kv.machine import describe_machine, versions
    from bench.kv.report import print_results
    from bench.kv.results import Results
    from engine.loading.dtype import resolve_dtype
    from engine.loading.embedded_model import ensure_model

    if plot is not None:
        _check_matplotlib()
    model_dir = ensure_model(settings.model, settings.cache_dir, progress)
    settings = replace(settings, dtype=resolve_dtype(settings.dtype, model_dir, "cpu").dtype)
    results, machine = Results(), describe_machine()
    for name, module in PARTS.items():
        if name not in parts:
            continue
        try:
            import_module(module).run(settings, results, progress)
        except BatonError as error:
            progress(f"{name}: failed: {error.message}")
            results.failed[name] = error.message
    if as_json:
        whole = {
            "machine": machine,
            "versions": versions(),
            "settings": {**asdict(settings), "only": list(parts)},
            **results.as_json(),
        }
        print(json.dumps(whole, ensure_ascii=False))
    else:
        print(f"{machine['cpu']}, {machine['usable_cores']} cores, {settings.model}, {settings.dtype}")
        print_results(results)
    if plot is not None:
        from bench.kv.picture import draw

        draw(results, plot, f"{machine['cpu']}, {machine['usable_cores']} cores")
        progress(f"picture: {plot}")
    return 1 if results.failed else 0


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401 - only asked whether it is there
    except ImportError as error:
        raise ConfigError("--plot", "matplotlib is not installed; pip install matplotlib") from error
