"""Decoders on transformers' code that ranks share: the list says what is so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import open_model
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine.local.device import LocalDevice
from engine.models.transformers_shard import SHARED, load_shard, shard_of_transformers
from engine.models.verified import VERIFIED
from engine.ranks.data_ranks import DataRanks
from engine.ranks.group import RankGroup
from engine.sampling.draws import draw
from engine.step import StepRow
from tests.engine.ranks.rank_processes import Nobody, RankProcesses
from tests.engine.tiny_models import full_logprobs
from tools.small_models import VARIATIONS, VOCAB_SIZE, UnbuildableError, build, save, small_config

TOLERANCE = 2e-3  # of float32 logprobs, which spread over tens
# Parallel blocks, latents and shared experts, norms of whole projections, experts.
QUICK = ("cohere", "deepseek_v3", "olmo2", "glm4_moe")

WITH_EXPERTS = [
    model_type
    for model_type in sorted(SHARED)
    if "moe_tp_experts" in CONFIG_MAPPING[model_type].base_model_tp_plan.values()
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(4, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def small(model_type: str, path: Path) -> Path:
    for variation in VARIATIONS:
        try:
            save(build(small_config(model_type, variation)), path)
        except UnbuildableError:
            continue
        return path
    raise AssertionError(f"no small {model_type}")


def compute(
    group: RankGroup | None, path: Path, expert_parallel_size: int = 1, kernels: str = "auto", num_data_ranks: int = 1
) -> tuple[list[SampledToken | None], KVCacheSpec]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 64,
        "num_threads": 1,
        "expert_parallel_size": expert_parallel_size,
        "kernels": kernels,
        "data_parallel_size": num_data_ranks,
    }
    runner = LocalDevice(path, EngineSettings.model_validate(settings), group=group)
    runner.kv_cache.fill_(float("nan"))
    token_ids = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    likeliest = draw(SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE), 0)
    tokens: list[SampledToken | None] = []
    start = 0
    for size in (23, 17, 1, 1, 9, 1, 7, 1):
        new = token_ids[start : start + size]
        row = StepRow(token_ids=new, num_computed_tokens=start, block_ids=[9, 3, 11, 5], draw=likeliest)
        rows = [row]
        if size == 9:  # two rows. Data ranks have a cache each here: the longer row stays on rank 0, as the others do
            rows.append(StepRow(token_ids=token_ids[:5], num_computed_tokens=0, block_ids=[1], draw=likeliest))
        tokens += runner.execute(rows)
        start += size
    return tokens, runner.info.spec


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(SHARED)]
)
def test_ranks_give_what_one_rank_gives(ranks: RankProcesses, tmp_path: Path, model_type: str) -> None:
    path = small(model_type, tmp_path / model_type)
    expected, whole = compute(None, path)
    runs = [(2, 1), (4, 1)]
    if model_type in WITH_EXPERTS:  # some whole on each rank
        runs.append((2, 2) if model_type in QUICK else (4, 4))
    for size, expert_parallel_size in runs:
        for rank, (tokens, spec) in enumerate(ranks.run(size, compute, path, expert_parallel_size)):
            assert spec.fingerprint() == whole.fingerprint()
            check_tokens(rank, tokens, expected)


def check_tokens(rank: int, tokens: Sequence[SampledToken | None], expected: Sequence[SampledToken | None]) -> None:
    for ours, theirs in zip(tokens, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.token_id == theirs.token_id
        if rank == 0:  # which alone tells logprobs
            torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WITH_EXPERTS]
)
def test_data_ranks_give_what_one_rank_gives(ranks: RankProcesses, tmp_path: Path, model_type: str, size: int) -> None:
    """In most steps all ranks but one have no row, and compute some experts of it."""
    path = small(model_type, tmp_path / model_type)
    expected, whole = compute(None, path)
    for rank, (tokens, spec) in enumerate(ranks.run(size, compute, path, num_data_ranks=size)):
        assert spec == whole
        check_tokens(rank, tokens, expected)


def test_types_that_are_shared_are_served() -> None:
    assert set(QUICK) <= SHARED <= VERIFIED.keys()
    for model_type in SHARED:
        assert CONFIG_MAPPING[model_type].base_model_tp_plan


def test_the_docs_list_them() -> None:
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    listed = text.partition("(`pytest\ntests/models/test_shared_models.py`), by model type:\n")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", listed) == sorted(SHARED)


def test_a_rank_has_its_part_of_the_layers(tmp_path: Path) -> None:
    path = small("cohere", tmp_path / "cohere")
    files = open_model(path)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = CONFIG_MAPPING["cohere"].from_dict(dict(files.config))
    for rank in range(2):
        shard = shard_of_transformers(config, Nobody(rank, 2))
        top, found = load_shard(files, shard, torch.float32, "eager")
        assert not found["missing_keys"]
        assert not found["mismatched_keys"]
        for name, parameter in top.named_parameters():
            is_cut = "_proj" in name
            assert parameter.numel() == sizes[name] // (2 if is_cut else 1), name


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_rank_has_its_experts_whole(tmp_path: Path, is_merged: bool) -> None:
    """As a file has them: each expert's weights in tensors of their own, or those of all experts in one."""
    path = small("qwen2_moe", tmp_path / "qwen2_moe")
    config = CONFIG_MAPPING["qwen2_moe"].from_dict(dict(open_model(path).config))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    if is_merged:
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    experts = {name: weight for name, weight in whole.items() if ".experts." in name}
    assert experts
    for size in (2, 4):
        parts: list[Mapping[str, torch.Tensor]] = []
        for rank in range(size):
            shard = shard_of_transformers(config, Nobody(rank, size), deals_experts=True)
            top, found = load_shard(open_model(path), shard, torch.float32, "eager")
            assert not found["missing_keys"]
            assert not found["mismatched_keys"]
            parts.append(top.state_dict())
        for name, weight in experts.items():
            assert len({len(part[name]) for part in parts}) <= 2
            assert torch.equal(torch.cat([part[name] for part in parts]), weight)
        assert parts[0]["model.layers.0.self_attn.q_proj.weight"].numel() * size == (
            whole["model.layers.0.self_attn.q_proj.weight"].numel()
        )


def test_a_data_rank_has_all_but_some_experts(tmp_path: Path) -> None:
    path = small("qwen2_moe", tmp_path / "qwen2_moe")
    config = CONFIG_MAPPING["qwen2_moe"].from_dict(dict(open_model(path).config))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    parts: list[Mapping[str, torch.Tensor]] = []
    for rank in range(3):
        shard = shard_of_transformers(config, DataRanks(Nobody(rank, 3)))
        top, found = load_shard(open_model(path), shard, torch.float32, "eager")
        assert not found["missing_keys"]
        assert not found["mismatched_keys"]
        parts.append(top.state_dict())
    for name, weight in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([part[name] for part in parts]), weight)
        else:
            assert all(torch.equal(part[name], weight) for part in parts)


# DeepSeek-V3, as its config.json has it, without the layer that predicts a second token.
DEEPSEEK_671B: dict[str, object] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "tie_word_embeddings": False,
}
NUM_WEIGHTS_671B = 671_026_404_352
NUM_MIXTURES_671B = 58  # layers with experts
NUM_WEIGHTS_OF_AN_EXPERT = 3 * 7168 * 2048


@pytest.mark.parametrize("size", [8, pytest.param(7, marks=pytest.mark.slow)])
def test_shapes_of_671b_weights_on_data_ranks(size: int) -> None:
    """As each rank builds them: all together are the model, and each rank has no more than its experts and the rest."""
    config = CONFIG_MAPPING["deepseek_v3"](**DEEPSEEK_671B)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole = dict(model.named_parameters())
    num_weights = sum(weight.numel() for weight in whole.values())
    assert num_weights == NUM_WEIGHTS_671B
    stop = 0
    for rank in range(size):
        shard = shard_of_transformers(config, DataRanks(Nobody(rank, size)))
        spans = {f"model.{name}": span for name, span in shard.keep_dealt(model.model).items()}
        assert len(spans) == 2 * NUM_MIXTURES_671B
        (span,) = set(spans.values())
        assert span.start == stop
        stop = span.stop
        own = dict(model.named_parameters())
        assert own.keys() == whole.keys()
        for name, weight in whole.items():
            assert own[name].shape == ((span.size, *weight.shape[1:]) if name in spans else weight.shape), name
            if name in spans:
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, weight)  # for the next rank
        elsewhere = NUM_MIXTURES_671B * (256 - span.size) * NUM_WEIGHTS_OF_AN_EXPERT
        assert sum(weight.numel() for weight in own.values()) == num_weights - elsewhere
    assert stop == 256


def test_experts_that_cannot_be_dealt_out_are_named(tmp_path: Path) -> None:
    path = small("qwen2_moe", tmp_path / "qwen2_moe")
    config = CONFIG_MAPPING["qwen2_moe"].from_dict(dict(open_model(path).config))
    shard = replace(shard_of_transformers(config, Nobody(0, 2), deals_experts=True), group=Nobody(0, 64))
    with pytest.raises(StartupError, match=r"--expert-parallel-size 64 leaves a rank without any of \d+ experts"):
        load_shard(open_model(path), shard, torch.float32, "eager")
    with pytest.raises(StartupError, match="--expert-parallel-size 2: this model has no experts"):
        shard_of_transformers(CONFIG_MAPPING["cohere"](), Nobody(0, 2), deals_experts=True)


@pytest.mark.slow
def test_experts_that_are_dealt_out_need_no_kernels(ranks: RankProcesses, tmp_path: Path) -> None:
    path = small("qwen2_moe", tmp_path / "qwen2_moe")
    expected, _ = compute(None, path, kernels="torch")
    tokens, _ = ranks.run(2, compute, path, 2, "torch")[0]
    for ours, theirs in zip(tokens, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt_neox", {}, "size 3: model type gpt_neox runs on transformers' code and was not compared"),
        ("cohere", {"num_attention_heads": 4}, "size 3 does not divide 4 attention heads"),
        ("cohere", {"num_attention_heads": 6, "num_key_value_heads": 2}, "size 3 is neither a divisor nor a multiple"),
        (
            "cohere",
            {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 80},
            "size 3 does not divide 80, the intermediate_size of config.json",
        ),
    ],
)
def test_what_ranks_cannot_share_is_named(model_type: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        shard_of_transformers(CONFIG_MAPPING[model_type](**changes), Nobody(0, 3))
