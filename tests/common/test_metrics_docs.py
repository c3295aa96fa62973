"""docs/metrics.md names metrics that there are, and each alias."""

from __future__ import annotations

import re
from pathlib import Path

from common.metric_aliases import ROUTER, WORKER
from tests.helm.test_dashboard import SERIES

DOCS = Path(__file__).parents[2] / "docs"
FAMILIES = {re.sub("_(bucket|sum|count)$", "", name) for name in SERIES}


def test_names_are_of_metrics_that_there_are() -> None:
    named = set(re.findall("`(baton_[a-z0-9_]+)`", (DOCS / "metrics.md").read_text()))
    assert named
    assert named <= FAMILIES


def test_each_alias_is_told_of() -> None:
    text = (DOCS / "metrics.md").read_text()
    made, left_out = text.split("Left out,")
    for alias in (*ROUTER, *WORKER):
        assert re.search(f"`{alias.name}(_total)?`", made), alias.name
        assert not re.search(f"`{alias.name}(_total)?`", left_out), alias.name
    told = {
        name.removesuffix("_total") for name in re.findall("`(vllm:[a-z0-9_]+)`", made.partition("| vLLM's name |")[2])
    }
    assert told == {alias.name for alias in (*ROUTER, *WORKER)}
