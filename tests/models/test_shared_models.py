"""Decoders on transformers' code that ranks share: the list says what is so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import open_model
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine.local.device import LocalDevice
from engine.models.transformers_shard import SHARED, load_shard, shard_of_transformers
from engine.models.verified import VERIFIED
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
    group: RankGroup | None, path: Path, expert_parallel_size: int = 1, kernels: str = "auto"
) -> tuple[list[SampledToken | None], KVCacheSpec]:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 64,
        "num_threads": 1,
        "expert_parallel_size": expert_parallel_size,
        "kernels": kernels,
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
        tokens += runner.execute([row])
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
        runs += [(2, 2)] if model_type in QUICK else [(2, 2), (4, 4)]
    for size, expert_parallel_size in runs:
        for rank, (tokens, spec) in enumerate(ranks.run(size, compute, path, expert_parallel_size)):
            assert spec.fingerprint() == whole.fingerprint()
            for ours, theirs in zip(tokens, expected, strict=True):
                assert ours is not None
                assert theirs is not None
                assert ours.token_id == theirs.token_id
                if rank == 0:  # which alone tells logprobs
                    torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), atol=TOLERANCE, rtol=0)


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
