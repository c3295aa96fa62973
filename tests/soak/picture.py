"""The picture of a soak: how long answers took and what processes held, over its time."""

from __future__ import annotations

from pathlib import Path

from tests.soak.record import WARM_SHARE, Record
from tests.soak.traffic import Latencies


def draw(record: Record, latencies: Latencies, path: Path, title: str) -> None:
    """Writes PNG, SVG or PDF, as `path` ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 9), sharex=True, layout="constrained")
    minutes = record.by_minute(latencies)
    for key, style in (("p50_s", "o-"), ("p99_s", "s-")):
        above.plot([row["minute"] + 0.5 for row in minutes], [row[key] for row in minutes], style, ms=3, label=key[:3])  # type: ignore[operator]
    above.set(title="Time to the whole answer, by the minute in which it was asked for", ylabel="s", yscale="log")
    for name, life in record.lives().items():
        is_whole = " #" not in name and life.memory[-1][0] > record.seconds - 60
        times = [at / 60 for at, _ in life.memory]
        below.plot(times, [mb for _, mb in life.memory], "-" if is_whole else ":", label=name if is_whole else None)
    below.set(title="Memory of each process (dotted: killed, or started again)", ylabel="MiB", xlabel="minutes")
    below.axvline(WARM_SHARE * record.seconds / 60, color="#888", linewidth=0.8)
    for at, what in record.events:
        if what.startswith("kill worker"):
            above.axvline(at / 60, color="#b2182b", linewidth=0.6, alpha=0.5)
    for axes in (above, below):
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
