"""The picture of a run: one panel a part, of those that ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.kv.exposed import TAIL_BAR, TTFT_SHARE_BAR
from bench.kv.results import Results, Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "memcpy": "#9a9a9a", "raw NIXL read": "#404040", "nixl": "#1f6fb4", "shared_storage, tmpfs": "#e08214",
    "shared_storage, disk": "#b35806", "shared_storage": "#e08214", "lmcache": "#4d9221",
    "colocated": "#b2182b", "disaggregated": "#1f6fb4",
}  # fmt: skip
_MODES = {"overlap": "o-", "no overlap": "s:"}


def draw(results: Results, path: Path, title: str) -> None:
    """Writes PNG, SVG or PDF, as `path` ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels: list[Callable[[Axes], None]] = []
    for shape in results.labels("handoff", "shape"):
        panels.append(partial(_handoff, results, shape=str(shape)))
    if results.labels("exposed", "length"):
        panels += [partial(_exposed, results), partial(_share, results), partial(_beyond, results)]
    if results.labels("control", "stage"):
        panels.append(partial(_stages, results))
    if results.labels("store", "length"):
        panels.append(partial(_store, results))
    if results.labels("colocated", "system"):
        panels += [partial(_tail, results, quantity=name) for name in ("TTFT ms", "ITL ms")]
    num_columns = min(3, max(len(panels), 1))
    num_rows = -(-max(len(panels), 1) // num_columns)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(6.2 * num_columns, 4.6 * num_rows), squeeze=False, layout="constrained"
    )
    for panel, axes in zip(panels, grid.flat, strict=False):
        panel(axes)
        axes.grid(axis="y", alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(f"baton bench kv: {title}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plain(value: float, _: object) -> str:
    """A tick's label: 2048, not 2^11."""
    return f"{value:g}"


def _spread(samples: list[Samples]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the quartiles are below and above them."""
    medians = [one.median for one in samples]
    low = [one.median - one.percentile(0.25) for one in samples]
    high = [one.percentile(0.75) - one.median for one in samples]
    return medians, [low, high]


def _handoff(results: Results, axes: Axes, shape: str) -> None:
    sizes = results.labels("handoff", "block_size", shape=shape)
    systems = results.labels("handoff", "system", shape=shape)
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        found = [
            (place, samples)
            for place, size in enumerate(sizes)
            if (samples := results.get("handoff", "GB/s", shape=shape, system=system, block_size=size))
        ]
        medians, error = _spread([samples for _, samples in found])
        places = [place + (number - (len(systems) - 1) / 2) * width for place, _ in found]
        axes.bar(places, medians, width, yerr=error, label=str(system), color=_COLOURS.get(str(system)), ecolor="#222")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(title=f"Handoff, {shape}", xlabel="tokens a block", ylabel="GB/s")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.2)  # room for the legend
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")


def _exposed(results: Results, axes: Axes) -> None:
    _by_length(results, axes, "exposed ms")
    axes.axhline(0, color="#888", linewidth=0.8)
    axes.set(title="Exposed handoff", xlabel="prompt tokens", ylabel="ms")


def _share(results: Results, axes: Axes) -> None:
    _by_length(results, axes, "% of TTFT")
    _bar(axes, TTFT_SHARE_BAR, "bar from 2,048 tokens on")
    axes.set(title="Exposed handoff as a share of TTFT", xlabel="prompt tokens", ylabel="%")
    axes.legend(fontsize=7, frameon=False)


def _beyond(results: Results, axes: Axes) -> None:
    _by_length(results, axes, "beyond transfer ms")
    _bar(axes, TAIL_BAR, "bar")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set(title="Exposed beyond the last transfer", xlabel="prompt tokens", ylabel="ms")
    axes.legend(fontsize=7, frameon=False)


def _bar(axes: Axes, limit: float, label: str) -> None:
    axes.axhline(limit, color="#b2182b", linewidth=0.9, linestyle="--", label=label)


def _by_length(results: Results, axes: Axes, quantity: str) -> None:
    for connector in results.labels("exposed", "connector"):
        for mode, style in _MODES.items():
            found = list(results.find("exposed", quantity, connector=connector, mode=mode))
            if not found:
                continue
            lengths = [float(one.labels["length"]) for one in found]
            medians, error = _spread([one.samples for one in found])
            colour = _COLOURS.get(str(connector))
            axes.errorbar(lengths, medians, error, fmt=style, color=colour, capsize=2, label=f"{connector}, {mode}")
    _lengths_axis(axes)


def _lengths_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    axes.legend(fontsize=7, frameon=False)


def _stages(results: Results, axes: Axes) -> None:
    stages = [stage for stage in results.labels("control", "stage") if stage != "all of these"]
    found = [samples for stage in stages if (samples := results.get("control", "µs per block", stage=stage))]
    medians, error = _spread(found)
    axes.barh(range(len(stages)), medians, xerr=error, color="#1f6fb4", ecolor="#222")
    axes.set_yticks(range(len(stages)), [str(stage) for stage in stages], fontsize=8)
    axes.invert_yaxis()
    whole = results.get("control", "µs per block", path="announce and acknowledge")
    measured = f"; end to end {whole.median:.1f}" if whole else ""
    axes.set(title="Control plane", xlabel=f"µs a block, in the code alone{measured}")


def _store(results: Results, axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for quantity, colour in (("hit TTFT ms", "#1f6fb4"), ("recompute TTFT ms", "#b2182b")):
        found = list(results.find("store", quantity))
        medians, error = _spread([one.samples for one in found])
        lengths = [float(one.labels["length"]) for one in found]
        axes.errorbar(
            lengths, medians, error, fmt="o-", color=colour, capsize=2, label=quantity.removesuffix(" TTFT ms")
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title="Store hit against recompute, new workers", xlabel="prompt tokens", ylabel="TTFT, ms")
    _lengths_axis(axes)


def _tail(results: Results, axes: Axes, quantity: str) -> None:
    """How large a share of the samples is above each value: the whole distribution, its tail readable."""
    for system in results.labels("colocated", "system"):
        samples = results.get("colocated", quantity, system=system)
        if samples is None:
            continue
        ordered = sorted(samples.values)
        share = [1 - rank / len(ordered) for rank in range(len(ordered))]
        label = f"{system}: p50 {samples.median:.0f}, p99 {samples.percentile(0.99):.0f}"
        axes.step(ordered, share, where="post", color=_COLOURS.get(str(system)), label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    axes.set(title=f"Chat beside long prompts: {quantity.removesuffix(' ms')}", xlabel="ms", ylabel="share above")
    axes.legend(fontsize=7, frameon=False)
