"""Which part of a model each rank has, and that no rank reads more of the files than that."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from common.model_files import open_model, read_safetensors_header
from common.types import KVCacheSpec
from engine.kernels.grouped import Codes, GroupedRows, Layout, QuantizedTensor, Scales
from engine.layers import PartPlace, Place
from engine.loading.checkpoints.part import NOTHING, Part, PartOfQuantized
from engine.loading.weights import load_weights
from engine.models.decoder import Decoder
from engine.models.families import describe, read_family_config
from engine.models.registry import build_model
from engine.models.stage import Stage
from engine.ranks.data_ranks import DataRanks
from kv_store.shards import shard_of
from tests.engine.ranks.rank_processes import Nobody
from tests.engine.tiny_models import FAMILIES, make_model

CPU, META = torch.device("cpu"), torch.device("meta")

LLAMA_70B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
# As many weights as DeepSeek-V3, without its latent attention: those models run on transformers' code.
MIXTURE_671B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 58,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 129280,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def shard(
    config: dict[str, object],
    rank: int,
    size: int,
    *,
    deals_experts: bool = False,
    is_data: bool = False,
    stage: Stage | None = None,
) -> Decoder:
    (architecture,) = config["architectures"]  # type: ignore[misc]
    description = describe(str(architecture), read_family_config(str(architecture), config), 64)
    nobody = Nobody(rank, size)
    group = DataRanks(nobody) if is_data else nobody
    return Decoder(
        description,
        num_positions=64,
        dtype=torch.bfloat16,
        device=META,
        group=group,
        deals_experts=deals_experts,
        stage=stage,
    )


def part_of(place: Place) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    """The whole tensor's shape, which ranges of it, and how many elements."""
    if not isinstance(place, PartPlace):
        return tuple(place.shape), ((0, place.shape[0]),), math.prod(place.shape)
    assert place.part.size == place.place.shape[place.part.axis]
    return place.shape, place.part.ranges, math.prod(place.place.shape)


def check_that_ranks_have_all(
    config: dict[str, object], size: int, *, deals_experts: bool = False, stage: Stage | None = None
) -> int:
    """Returns how many weights the model, or the stage, has."""
    by_rank = [shard(config, rank, size, deals_experts=deals_experts, stage=stage).places() for rank in range(size)]
    total = 0
    if deals_experts:
        whole = [{name: place for name, place in places.items() if ".experts." in name} for places in by_rank]
        assert len(set().union(*whole)) == sum(map(len, whole)), "an expert is on one rank"
        assert max(map(len, whole)) == min(map(len, whole))
        total += sum(part_of(place)[2] for places in whole for place in places.values())
        by_rank = [{name: place for name, place in places.items() if ".experts." not in name} for places in by_rank]
    for name in by_rank[0]:
        parts = [part_of(places[name]) for places in by_rank]
        shapes = {shape for shape, _, _ in parts}
        assert len(shapes) == 1
        num_elements = math.prod(shapes.pop())
        total += num_elements
        own = [count for _, _, count in parts]
        if isinstance(by_rank[0][name], PartPlace):
            assert sum(own) == num_elements, name
            ranges = sorted(each for _, some, _ in parts for each in some)
            assert all(before[1] == after[0] for before, after in pairwise(ranges)), name
        else:
            assert own == [num_elements] * size, name
            assert "norm" in name or ".gate." in name, "only what is small is on every rank"
    return total


@pytest.mark.parametrize(
    ("config", "num_weights", "deals_experts"),
    [
        pytest.param(LLAMA_70B, 70_553_706_496, False, id="70b"),
        pytest.param(MIXTURE_671B, 670_343_955_968, False, id="671b", marks=pytest.mark.slow),
        pytest.param(MIXTURE_671B, 670_343_955_968, True, id="671b-experts-dealt-out", marks=pytest.mark.slow),
    ],
)
def test_large_shapes_on_8_ranks(config: dict[str, object], num_weights: int, deals_experts: bool) -> None:
    """Their layers are alike, so all of them are what one is, and what a second adds."""
    one, two = (
        check_that_ranks_have_all({**config, "num_hidden_layers": number}, 8, deals_experts=deals_experts)
        for number in (1, 2)
    )
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    assert one + (num_layers - 1) * (two - one) == num_weights


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 8])
def test_large_shapes_on_data_ranks(size: int) -> None:
    """Each rank has all of the model but other ranks' experts. As above, of what a layer is and what a second adds."""

    def held(num_layers: int) -> tuple[int, int]:
        """Weights of experts on all ranks together, and of the rest on each."""
        config = {**MIXTURE_671B, "num_hidden_layers": num_layers}
        whole = {name: place.shape for name, place in shard(config, 0, 1).places().items()}
        by_rank = [shard(config, rank, size, is_data=True).places() for rank in range(size)]
        experts = {name for name in whole if ".experts." in name}
        rest = whole.keys() - experts
        names = [{name for name in places if name in experts} for places in by_rank]
        assert set().union(*names) == experts
        assert sum(map(len, names)) == len(experts), "an expert is on one rank"
        for places in by_rank:
            assert places.keys() - experts == rest
            assert all(part_of(place)[2] == math.prod(whole[name]) for name, place in places.items())
        return sum(math.prod(whole[name]) for name in experts), sum(math.prod(whole[name]) for name in rest)

    (experts, rest), (more_experts, more_rest) = held(1), held(2)
    of_one_layer = more_experts - experts + more_rest - rest
    assert experts + rest + 57 * of_one_layer == 670_343_955_968


@pytest.mark.parametrize(
    ("config", "num_weights", "deals_experts"),
    [
        pytest.param(LLAMA_70B, 70_553_706_496, False, id="70b"),
        pytest.param(MIXTURE_671B, 670_343_955_968, False, id="671b", marks=pytest.mark.slow),
        pytest.param(MIXTURE_671B, 670_343_955_968, True, id="671b-experts-dealt-out", marks=pytest.mark.slow),
    ],
)
def test_large_shapes_in_4_stages_of_2_ranks(config: dict[str, object], num_weights: int, deals_experts: bool) -> None:
    stages = [Stage(number, 4) for number in range(4)]
    names = [set(shard(config, 0, 2, deals_experts=deals_experts, stage=stage).places()) for stage in stages]
    assert len(set().union(*names)) == sum(map(len, names)), "a tensor is in one stage"
    held = [check_that_ranks_have_all(config, 2, deals_experts=deals_experts, stage=stage) for stage in stages]
    assert sum(held) == num_weights
    assert max(held) < num_weights / 4 * 1.05


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 3, "--tensor-parallel-size 3 does not divide 64 attention heads"),
        ({"intermediate_size": 28676}, 8, "--tensor-parallel-size 8 does not divide 28676 inner elements of the MLP"),
        (
            {"hidden_size": 480, "num_attention_heads": 60, "num_key_value_heads": 10},
            4,
            "--tensor-parallel-size 4 is neither a divisor nor a multiple of 10 KV heads",
        ),
        ({"vocab_size": 6}, 8, "--tensor-parallel-size 8 leaves a rank without any of 6 rows of the vocabulary"),
    ],
)
def test_what_ranks_cannot_share_is_named(changes: dict[str, object], size: int, reason: str) -> None:
    with pytest.raises(StartupError) as caught:
        shard({**LLAMA_70B, "num_hidden_layers": 1, **changes}, 0, size)
    assert caught.value.message == reason


def test_experts_that_ranks_cannot_share_are_named() -> None:
    with pytest.raises(StartupError, match="size 8 does not divide 2044 inner elements of an expert"):
        shard({**MIXTURE_671B, "num_hidden_layers": 1, "moe_intermediate_size": 2044}, 0, 8)


def test_experts_that_cannot_be_dealt_out_are_named() -> None:
    mixture = {**MIXTURE_671B, "num_hidden_layers": 1, "moe_intermediate_size": 2044}
    assert shard(mixture, 0, 8, deals_experts=True).shard.experts.size == 32
    with pytest.raises(StartupError, match="--expert-parallel-size 8 leaves a rank without any of 6 experts"):
        shard({**mixture, "num_experts": 6, "num_experts_per_tok": 2}, 0, 8, deals_experts=True)
    with pytest.raises(StartupError, match="--expert-parallel-size 8: this model has no experts"):
        shard({**LLAMA_70B, "num_hidden_layers": 1}, 0, 8, deals_experts=True)


def test_transformers_code_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", {"model_type": "gpt_neox", "tie_word_embeddings": False})
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(-1, 2))
    with pytest.raises(
        StartupError, match="size 2: model type gpt_neox runs on transformers' code and was not compared"
    ):
        build_model(open_model(path), num_positions=8, dtype=torch.float32, device=CPU, group=Nobody(0, 2))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 4])
def test_kv_is_that_of_the_rank_s_heads(num_kv_heads: int, size: int) -> None:
    """Ranks that share heads keep equal shards; all together are the whole, whose fingerprint each has."""
    config = {**LLAMA_70B, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    whole = KVCacheSpec(
        model_id="m", num_layers=1, num_kv_heads=num_kv_heads, head_dim=8, block_size=16, dtype="float32"
    )
    for rank in range(size):
        model = shard(config, rank, size)
        tp_rank, tp_size = model.kv_shard
        spec = shard_of(whole, tp_size, tp_rank)
        assert spec.num_kv_heads == model.num_kv_heads
        assert spec.fingerprint() == whole.fingerprint()
        first = rank * num_kv_heads // size
        assert spec.heads == range(first, first + max(1, num_kv_heads // size))


@pytest.mark.parametrize(
    ("name", "deals_experts"),
    [
        ("phi3", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("llama", "qwen3_moe")),
        ("qwen3_moe_sparse", True),
    ],
)
def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, name: str, deals_experts: bool) -> None:
    path = make_model(tmp_path / name, {**FAMILIES[name], "vocab_size": 2000, "tie_word_embeddings": False})
    files = open_model(path)
    header, _ = read_safetensors_header(files.weight_files[0])
    whole = sum(math.prod(entry["shape"]) * 4 for key, entry in header.items() if key != "__metadata__")
    read = []
    for rank in range(4):
        group = Nobody(rank, 4)
        model = build_model(
            files, num_positions=64, dtype=torch.float32, device=CPU, group=group, deals_experts=deals_experts
        )
        assert isinstance(model, Decoder)
        places = model.places()
        num_bytes = load_weights(files, places, may_skip=lambda name: ".experts." in name)
        assert num_bytes == 4 * sum(part_of(place)[2] for place in places.values())
        read.append(num_bytes)
    norms = sum(math.prod(entry["shape"]) * 4 for key, entry in header.items() if "norm" in key or ".gate." in key)
    assert max(read) <= whole / 4 + norms + whole * 0.01  # 2 KV heads are kept by two ranks each


def test_parts_of_rows() -> None:
    part = Part.of_rows([(2, 4), (4, 5), (9, 9), (10, 13)])
    assert part.ranges == ((2, 5), (9, 9), (10, 13))
    assert part.size == 6
    assert part.rows(0, 6) == [(2, 5), (10, 13)]
    assert part.rows(2, 4) == [(4, 5), (10, 11)]
    assert part.of(torch.arange(20)).tolist() == [2, 3, 4, 10, 11, 12]
    assert Part.of_rows([(0, 3), (3, 7)]).is_all_of(7)
    assert NOTHING.size == 0


class _Codes(QuantizedTensor):
    """8-bit codes with a scale for 32 of them, and one more number for each 32 if it has two levels."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.shape = (codes.shape[0], codes.shape[1])
        self.layout = Layout(Codes.BITS8, Scales.SINGLE, 32)
        self._codes, self._scales = codes, scales

    def rows(self, start: int, stop: int) -> GroupedRows:
        heads = self._scales[start:stop, :, None].contiguous().view(torch.uint8)
        return GroupedRows(self.layout, self._codes[start:stop], heads)


def test_a_part_of_a_quantised_matrix_is_the_part_of_its_numbers() -> None:
    codes = torch.randint(0, 256, (6, 128), dtype=torch.uint8)
    whole = _Codes(codes, torch.rand(6, 4))
    numbers = whole.rows(0, 6).dequantize()
    for part in (Part.of_rows([(1, 3), (4, 6)]), Part(1, ((32, 96),))):
        cut = PartOfQuantized(whole, part, "w")
        assert cut.shape == tuple(part.of(numbers).shape)
        assert torch.equal(cut.rows(0, cut.shape[0]).dequantize(), part.of(numbers))
        assert torch.equal(cut.rows(1, 3).dequantize(), part.of(numbers)[1:3])
    with pytest.raises(StartupError, match="w is quantised in groups of 32 weights, which cannot be cut"):
        PartOfQuantized(whole, Part(1, ((16, 48),)), "w")
