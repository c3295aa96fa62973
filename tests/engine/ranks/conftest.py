from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.ranks.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Four processes; of groups of two, the first two."""
    with RankProcesses(4, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes
