from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.ranks.rank_processes import RankProcesses
from tests.engine.tiny_models import make_model


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Four processes; of groups of two, the first two."""
    with RankProcesses(4, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers: stages have unlike numbers of them."""
    path = tmp_path_factory.mktemp("models") / "shared_by_ranks"
    return make_model(path, {"num_hidden_layers": 5, "tie_word_embeddings": True})


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has several micro-batches or groups, although tests are short."""
    monkeypatch.setattr("engine.ranks.pipeline.MICRO_BATCH_TOKENS", 6)
    monkeypatch.setattr("engine.ranks.pipeline.GROUP_ROWS", 1)
