"""The tiers that tests/conftest.py names."""

from __future__ import annotations

from itertools import combinations

from tests.conftest import TESTS, TIERS


def test_each_file_is_there_and_belongs_to_one_target() -> None:
    parts = [(tier, TESTS / part) for tier, names in TIERS.items() if tier != "integration" for part in names]
    assert [part for _, part in parts if not part.exists()] == []
    assert [pair for pair in combinations(parts, 2) if pair[0][1].is_relative_to(pair[1][1])] == []
    assert [pair for pair in combinations(parts, 2) if pair[1][1].is_relative_to(pair[0][1])] == []
