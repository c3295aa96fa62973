"""Data ranks: each computes attention for some rows of a step and some experts for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from common.errors import ConfigError, StartupError
from common.sampling import SamplingParams
from engine.device_thread import DeviceThread
from engine.devices import open_device
from engine.local.device import LocalDevice
from engine.models.decoder import Decoder
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
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture that runs on transformers' code; its first layer has no experts, and all others a shared one."""
    flags = {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    }
    return make_model(tmp_path_factory.mktemp("models") / "theirs", flags)


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
    check_answers(mixture, num_ranks, **changes)


@needs_library
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_answers_of_transformers_code_are_those_of_one_rank(theirs: Path, num_ranks: int, kernels: str) -> None:
    check_answers(theirs, num_ranks, num_blocks=9, preemption_mode="recompute", kernels=kernels)


def check_answers(model: Path, num_ranks: int, **changes: object) -> None:
    settings = settings_of(1, **changes)
    wanted, _ = answers(LocalDevice(model, settings), settings)
    with ranked(model, 1, data_parallel_size=num_ranks, expert_parallel_size=num_ranks, **changes) as device:
        assert len(device.planes()) == 1
        assert device.kernels_name.endswith(f", {num_ranks} ranks, requests and experts dealt out")
        thread = DeviceThread(device)
        more = {"data_parallel_size": num_ranks, "run_ahead": True}
        given, num_preemptions = answers(thread, settings_of(1, **more, **changes))
        thread.close()
    assert given == wanted
    assert num_preemptions > 0


@needs_library
@pytest.mark.parametrize("name", ["mixture", "theirs"])
def test_every_kind_of_row(request: pytest.FixtureRequest, name: str) -> None:
    """Experts are dealt out whether or not --expert-parallel-size says so."""
    model: Path = request.getfixturevalue(name)
    expected = LocalDevice(model, settings_of(1)).compute(rows())
    with ranked(model, 1, data_parallel_size=2) as device:
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


@dataclass(slots=True)
class Exchanged:
    """Of one step, on one rank."""

    collectives: list[tuple[str, int]]  # bytes that an all-to-all sends to others, that others are told
    chosen: list[list[list[int]]]  # by layer and own token, numbers of experts


def asked(group: RankGroup, path: Path, steps: list[list[StepRow]]) -> list[Exchanged]:
    counting = CountingGroup(group)
    runner = make_runner(path, group=counting, data_parallel_size=group.size)
    runner.kv_cache.zero_()
    chosen: list[list[list[int]]] = []
    model = runner._model
    assert isinstance(model, Decoder)
    for layer in model.layers:
        assert layer.experts is not None
        layer.experts.route = noting(layer.experts.route, chosen)  # type: ignore[method-assign]
    found = []
    for step in steps:
        counting.asked.clear()
        chosen.clear()
        runner.execute(step)
        collectives = [(name, math.prod(shape) * dtype.itemsize) for name, shape, dtype in counting.asked]
        found.append(Exchanged(collectives, list(chosen)))
    return found


Route: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def noting(route: Route, into: list[list[list[int]]]) -> Route:
    def noted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, shares = route(x)
        into.append(chosen.tolist())
        return chosen, shares

    return noted


def num_travelling(found: Sequence[Exchanged], layer: int, sender: int, receiver: int) -> int:
    """How many of the sender's tokens chose an expert of the receiver: of 5 experts, 2 ranks have 2 and 3."""
    return sum(any((expert >= 2) == receiver for expert in token) for token in found[sender].chosen[layer])


def test_what_ranks_exchange_in_a_step(ranks: RankProcesses, mixture: Path) -> None:
    """For each layer two all-to-alls: tokens go to a rank whose experts they chose, and what these gave comes back. At
    the end the states that are read. Nothing for attention. A step of one row takes as many exchanges, though one rank
    has nothing."""
    likeliest = draw(SamplingParams(temperature=0.0), 0)
    chunk = StepRow(token_ids=[5, 6, 7, 8, 9], num_computed_tokens=0, block_ids=[0], draw=likeliest)
    single = StepRow(token_ids=[5], num_computed_tokens=0, block_ids=[1], draw=likeliest)
    silent = StepRow(token_ids=[5, 6], num_computed_tokens=0, block_ids=[2])
    steps = [[chunk, single, silent], [single], [silent]]
    token = HIDDEN_SIZE * 4
    with_choice = token + 2 * (4 + 4)  # number and share of each expert
    states = [token, token, 4]
    num_tokens = [(5, 3), (1, 0), (2, 0)]
    by_rank = ranks.run(2, asked, mixture, steps)
    for number in range(len(steps)):
        found = [each[number] for each in by_rank]
        for rank, each in enumerate(found):
            assert [len(chosen) for chosen in each.chosen] == [num_tokens[number][rank]] * NUM_LAYERS
            expected = []
            for layer in range(NUM_LAYERS):
                expected.append(("all_to_all", num_travelling(found, layer, rank, 1 - rank) * with_choice))
                expected.append(("all_to_all", num_travelling(found, layer, 1 - rank, rank) * token))
            assert each.collectives == [*expected, ("all_gather", states[number])]
        # All ranks given all tokens, each part as long as the longest, and a sum of all tokens.
        all_tokens = NUM_LAYERS * token * (2 * max(num_tokens[number]) + 2 * sum(num_tokens[number]))
        travelled = sum(size for each in found for name, size in each.collectives if name == "all_to_all")
        assert travelled < all_tokens


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


def joined(group: RankGroup) -> torch.Tensor:
    counts = [3, 0, 1, 2]
    own = torch.full((counts[group.rank], 2), float(group.rank))
    return DataRanks(group).join(own, counts)


def test_rows_of_all_ranks_are_joined(ranks: RankProcesses) -> None:
    everything = torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0, 3.0])[:, None].expand(6, 2)
    for found in ranks.run(4, joined):
        assert torch.equal(found, everything)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "--data-parallel-size: does not go with --tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--data-parallel-size: does not go with --pipeline-parallel-size"),
        ({"expert_parallel_size": 3}, "--expert-parallel-size: is 1 or as many as --data-parallel-size, which is 2"),
        ({"num_hosts": 2, "host_index": 0}, "--num-hosts: does not go with --data-parallel-size"),
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
