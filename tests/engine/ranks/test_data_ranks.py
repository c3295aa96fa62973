"""Data ranks: each computes attention for some rows of a step and some experts for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, StartupError
from common.sampling import SamplingParams
from engine.device_thread import DeviceThread
from engine.devices import open_device
from engine.local.device import LocalDevice
from engine.ranks.data_ranks import DataRanks, deal
from engine.ranks.group import RankGroup
from engine.ranks.shared_memory import exchange_library
from engine.sampling.draws import draw
from engine.step import StepRow
from tests.engine.ranks.devices import answers, ranked, rows, settings_of
from tests.engine.ranks.rank_processes import CountingGroup, RankProcesses
from tests.engine.tiny_models import FAMILIES, make_model, make_runner

needs_library = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")
HIDDEN_SIZE, NUM_LAYERS = 64, 3


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "mixture", {**FAMILIES["mixtral"], "sliding_window": None})


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "dense")


@needs_library
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_answers_are_those_of_one_rank(mixture: Path, num_ranks: int, mode: str, kernels: str) -> None:
    """Chunks, batches, steps in which ranks have no row, blocks found again that another rank may have written,
    requests that give their blocks up and come back, steps that begin before others have ended."""
    changes = {"num_blocks": 9, "preemption_mode": mode, "swap_space_gb": 0.01, "host_cache_gb": 0.001}
    changes["kernels"] = kernels
    settings = settings_of(1, **changes)
    wanted, _ = answers(LocalDevice(mixture, settings), settings)
    with ranked(mixture, 1, data_parallel_size=num_ranks, **changes) as device:
        assert len(device.planes()) == 1
        assert device.kernels_name.endswith(f", {num_ranks} ranks, requests and experts dealt out")
        thread = DeviceThread(device)
        more = {"data_parallel_size": num_ranks, "run_ahead": True}
        given, num_preemptions = answers(thread, settings_of(1, **more, **changes))
        thread.close()
    assert given == wanted
    assert num_preemptions > 0


@needs_library
def test_every_kind_of_row(mixture: Path) -> None:
    expected = LocalDevice(mixture, settings_of(1)).compute(rows())
    with ranked(mixture, 1, data_parallel_size=2) as device:
        found = device.compute(rows())
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        assert (ours and ours.token_id) == (theirs and theirs.token_id)
    assert found.scores.keys() == expected.scores.keys()
    for index, scores in expected.scores.items():
        ours = [token.logprob for token in found.scores[index]]
        assert ours == pytest.approx([token.logprob for token in scores], abs=1e-4)
    for index, pooled in expected.pooled.items():
        assert found.pooled[index] == pytest.approx(pooled, abs=1e-4)


@needs_library
def test_drafted_tokens_stay_with_their_request(mixture: Path) -> None:
    """Rows of one step that need each other's KV."""
    likeliest = draw(SamplingParams(temperature=0.0), 0)
    chain = [StepRow(token_ids=[5 + at], num_computed_tokens=at, block_ids=[3, 1], draw=likeliest) for at in range(20)]
    other = [StepRow(token_ids=[9, 8, 7], num_computed_tokens=0, block_ids=[6], draw=likeliest)]
    expected = LocalDevice(mixture, settings_of(1)).execute([*chain, *other])
    with ranked(mixture, 1, data_parallel_size=2) as device:
        assert device.execute([*chain, *other]) == expected


def asked(group: RankGroup, path: Path, steps: list[list[StepRow]]) -> list[list[tuple[str, int]]]:
    counting = CountingGroup(group)
    runner = make_runner(path, group=counting, data_parallel_size=group.size)
    runner.kv_cache.zero_()
    found = []
    for step in steps:
        counting.asked.clear()
        runner.execute(step)
        found.append([(name, torch.Size(shape).numel() * dtype.itemsize) for name, shape, dtype in counting.asked])
    return found


def test_what_ranks_exchange_in_a_step(ranks: RankProcesses, mixture: Path) -> None:
    """For each layer one gather, as long as the longest part, and a sum of all tokens; at the end the states that are
    read. Nothing for attention. A step of one row takes as many exchanges, though one rank has nothing."""
    likeliest = draw(SamplingParams(temperature=0.0), 0)
    chunk = StepRow(token_ids=[5, 6, 7, 8, 9], num_computed_tokens=0, block_ids=[0], draw=likeliest)
    single = StepRow(token_ids=[5], num_computed_tokens=0, block_ids=[1], draw=likeliest)
    silent = StepRow(token_ids=[5, 6], num_computed_tokens=0, block_ids=[2])
    token = HIDDEN_SIZE * 4
    both, one, none = [
        [("all_gather", longest * token), ("all_reduce", total * token)] * NUM_LAYERS
        for longest, total in ((5, 8), (1, 1), (2, 2))
    ]
    expected = [
        [*both, ("all_gather", token)],
        [*one, ("all_gather", token)],
        [*none, ("all_gather", 4)],
    ]
    for found in ranks.run(2, asked, mixture, [[chunk, single, silent], [single], [silent]]):
        assert found == expected


def row(num_new: int, num_computed: int, blocks: list[int]) -> StepRow:
    return StepRow(token_ids=[0] * num_new, num_computed_tokens=num_computed, block_ids=blocks)


def test_rows_are_dealt_out_by_their_work() -> None:
    four = [row(1, 30, [at, at + 10]) for at in range(4)]
    assert deal(four, 2, 16, 64) == [[0, 2], [1, 3]]
    assert deal(four, 4, 16, 64) == [[0], [1], [2], [3]]
    assert deal(four[:1], 3, 16, 64) == [[0], [], []]
    assert deal([*four, row(40, 0, [20, 21, 22])], 2, 16, 64) == [[4], [0, 1, 2, 3]]
    # A long context is work, too.
    assert deal([row(1, 1000, list(range(63))), *four], 2, 16, 64) == [[0], [1, 2, 3, 4]]


def test_rows_that_need_each_other_are_dealt_out_together() -> None:
    chain = [row(1, 15 + at, [7, 8]) for at in range(3)]  # the first ends a block
    same_prefix = row(1, 16, [7, 9])
    assert deal([*chain, row(1, 3, [1])], 2, 16, 64) == [[0, 1, 2], [3]]
    assert deal([chain[2], chain[0], row(1, 3, [1]), chain[1]], 2, 16, 64) == [[0, 1, 3], [2]]
    assert deal([row(1, 17, [7, 8]), same_prefix], 2, 16, 64) == [[0], [1]]


def joined(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = DataRanks(group)
    counts = [3, 0, 1, 2]
    ranks.begin(counts)
    own = torch.full((counts[group.rank], 2), float(group.rank))
    everything = ranks.join(own)
    return everything, ranks.sum_own(everything + group.rank)


def test_tokens_of_all_ranks_are_joined_and_given_back(ranks: RankProcesses) -> None:
    everything = torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0, 3.0])[:, None].expand(6, 2)
    for rank, (found, own) in enumerate(ranks.run(4, joined)):
        assert torch.equal(found, everything)
        start, stop = ((0, 3), (3, 3), (3, 4), (4, 6))[rank]
        assert torch.equal(own, 4 * everything[start:stop] + 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "--data-parallel-size: does not go with --tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--data-parallel-size: does not go with --pipeline-parallel-size"),
        ({"expert_parallel_size": 3}, "--expert-parallel-size: is 1 or as many as --data-parallel-size, which is 2"),
        ({"device": "simulated"}, "--data-parallel-size: a simulated device takes the time"),
        ({"speculation": "some/model"}, "--data-parallel-size: does not go with a draft model"),
    ],
)
def test_what_is_refused(mixture: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_device(mixture, settings_of(1, **{"data_parallel_size": 2, **changes}))


@needs_library
def test_models_that_are_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--data-parallel-size 2: this model has no experts; start more workers"):
        ranked(dense, 1, data_parallel_size=2).__enter__()
    few = make_model(tmp_path / "few", {**FAMILIES["mixtral"], "num_local_experts": 2})
    with pytest.raises(StartupError, match="--data-parallel-size 3 leaves a rank without any of 2 experts"):
        ranked(few, 1, data_parallel_size=3).__enter__()
    other = make_model(tmp_path / "other", {"model_type": "gpt_neox", "tie_word_embeddings": False})
    with pytest.raises(StartupError, match="--data-parallel-size 2: model type gpt_neox runs on transformers' code"):
        ranked(other, 1, data_parallel_size=2).__enter__()
