"""What a run found: samples under labels, bars that were met or missed, and what was skipped and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.load.percentiles import percentile

Label = str | int
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(slots=True, frozen=True)
class Samples:
    """One quantity, measured again and again, in the order of measuring. At least one value."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("no samples")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def percentile(self, share: float) -> float:
        """The smallest value that `share` (0 to 1) of all values do not exceed (nearest rank)."""
        return percentile(self.values, share)

    def as_json(self) -> dict[str, Json]:
        return {
            "median": self.median,
            "p25": self.percentile(0.25),
            "p75": self.percentile(0.75),
            "p99": self.percentile(0.99),
            "values": list(self.values),
        }


@dataclass(slots=True, frozen=True)
class Record:
    """`part` measured `quantity` (with its unit: "GB/s", "exposed ms") under the conditions that `labels` name."""

    part: str
    quantity: str
    labels: Mapping[str, Label]
    samples: Samples

    def as_json(self) -> dict[str, Json]:
        return {"part": self.part, "quantity": self.quantity, "labels": dict(self.labels), **self.samples.as_json()}


@dataclass(slots=True, frozen=True, kw_only=True)
class Bar:
    """A limit that a figure should stay under, or reach."""

    part: str
    name: str
    value: float
    limit: float
    unit: str
    where: str = ""  # which of several places the worst figure comes from
    bound: str = ""  # what keeps it from being better
    is_floor: bool = False  # a figure should reach it

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_floor else self.value <= self.limit

    def sentence(self) -> str:
        """`met: ... 4.2 % (bar 10 %, 5.8 % to spare)`"""
        gap = abs(self.limit - self.value)
        verdict = (
            f"{gap:.1f} {self.unit} {'to spare' if self.is_met else 'too little' if self.is_floor else 'too much'}"
        )
        text = f"{'met' if self.is_met else 'MISSED'}: {self.name}: {self.value:.1f} {self.unit} "
        text += f"(bar {self.limit:g} {self.unit}, {verdict})"
        text += f", {self.where}" if self.where else ""
        return text + (f"; bound by {self.bound}" if self.bound else "")

    def as_json(self) -> dict[str, Json]:
        return {
            "part": self.part, "name": self.name, "value": self.value, "limit": self.limit, "unit": self.unit,
            "met": self.is_met, "where": self.where, "bound": self.bound, "floor": self.is_floor,
        }  # fmt: skip


@dataclass(slots=True)
class Results:
    records: list[Record] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # what cannot be measured here, and why
    failed: dict[str, str] = field(default_factory=dict)  # part that ended early, and why; what it had found counts

    def add(self, part: str, figures: Mapping[str, Sequence[float]], **labels: Label) -> None:
        """`figures`: quantity to its samples; one without any is left out."""
        for quantity, values in figures.items():
            if values:
                self.records.append(Record(part, quantity, labels, Samples(tuple(values))))

    def find(self, part: str, quantity: str, **labels: Label) -> Iterator[Record]:
        """Records that have all of `labels`, and maybe more."""
        for record in self.records:
            if record.part == part and record.quantity == quantity and labels.items() <= record.labels.items():
                yield record

    def get(self, part: str, quantity: str, **labels: Label) -> Samples | None:
        """The samples of the first such record; None if it was not measured."""
        return next((record.samples for record in self.find(part, quantity, **labels)), None)

    def labels(self, part: str, name: str, **labels: Label) -> list[Label]:
        """Values of label `name`, in the order of measuring."""
        found = (record.labels for record in self.records if record.part == part)
        return list(dict.fromkeys(one[name] for one in found if name in one and labels.items() <= one.items()))

    def as_json(self) -> dict[str, Json]:
        return {
            "records": [record.as_json() for record in self.records],
            "bars": [bar.as_json() for bar in self.bars],
            "skipped": dict(self.skipped),
            "failed": dict(self.failed),
        }
