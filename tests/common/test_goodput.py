"""What `--goodput` says, for `bench serve` and `simulate`."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.goodput import is_good, parse_goodput


def test_targets_have_vllms_names() -> None:
    targets = {"ttft": 150, "tpot": 12.5, "e2el": 1000}
    assert parse_goodput(["ttft:150", "tpot:12.5,e2el:1e3"], "goodput") == targets
    assert parse_goodput(["ttft:150 tpot:12.5", "e2e:1000"], "goodput") == targets
    assert parse_goodput([""], "goodput") == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ttft", "--goodput: 'ttft' has no number of milliseconds above 0"),
        ("ttft:-1", "'ttft:-1' has no number"),
        ("ttft:x", "'ttft:x' has no number"),
        ("ttft:inf", "'ttft:inf' has no number"),
        ("tpot:nan", "'tpot:nan' has no number"),
        ("latency:5", "--goodput: 'latency' is not one of ttft, tpot, e2el"),
        ("e2e:5,e2el:6", "--goodput: e2el is given twice"),
    ],
)
def test_targets_that_are_none(text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        parse_goodput([text], "--goodput")


def test_an_answer_keeps_every_target() -> None:
    took = {"ttft_s": 0.1, "tpot_s": 0.02, "e2el_s": 0.5}
    assert is_good({}, **took)
    assert is_good({"ttft": 100.0, "tpot": 20.0, "e2el": 500.0}, **took)
    for name in ("ttft", "tpot", "e2el"):
        assert not is_good({"ttft": 100.0, "tpot": 20.0, "e2el": 500.0} | {name: 1.0}, **took)
    assert is_good({"tpot": 1.0}, ttft_s=0.1, tpot_s=None, e2el_s=0.1)
