"""Models that 2 and 4 processes share give the tokens that one process gives."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine.loading.checkpoints.gguf_model import ensure_directory
from engine.local.device import LocalDevice
from engine.ranks.group import OneRank, RankGroup
from engine.sampling.draws import draw
from engine.step import Drawn, StepInput, StepRow
from tests.engine.gguf_files import Type, write_gguf
from tests.engine.kernels.variants import ALL
from tests.engine.ranks.rank_processes import CountingGroup, RankProcesses
from tests.engine.test_model_quantized import pack_fp8
from tests.engine.tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    SHAPES,
    VOCAB_SIZE,
    advance,
    make_model,
    make_runner,
    random_sequences,
)

FIXTURES = Path(__file__).parents[1] / "quantized"
TOLERANCE = 2e-4  # of float32 logprobs, as between a family and transformers
NUM_TOKENS = 8
LIKELIEST = draw(SamplingParams(temperature=0.0), 0)

# Beside the families: of 2 KV heads 4 ranks share each, and a vocabulary that cannot be cut evenly.
MODELS: dict[str, dict[str, object]] = {
    **{name: flags for name, flags in FAMILIES.items() if name not in ("mistral_without_window", "gemma3_all_sliding")},
    "one_kv_head": SHAPES["one_kv_head"],
    "all_heads": SHAPES["all_heads"],
    "biases": SHAPES["biases"],
    "tied": SHAPES["tied"],
    "odd_vocabulary": {"vocab_size": 95, "tie_word_embeddings": True},
}
QUICK = ("mixtral",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, name: str) -> Path:
    path = models / name
    return path if path.exists() else make_model(path, MODELS[name])


@dataclass(slots=True)
class Computed:
    spec: KVCacheSpec
    chunked: list[dict[int, torch.Tensor]]  # logprobs of two sequences side by side, by position
    greedy: list[list[int]]  # a prompt's answer: whole, in chunks, and with the prompt's first blocks computed before


def greedy(runner: LocalDevice, prompt: Sequence[int], chunk: int, blocks: list[int], num_cached: int = 0) -> list[int]:
    token_ids, num_computed = list(prompt), num_cached
    while len(token_ids) < len(prompt) + NUM_TOKENS:
        new = token_ids[num_computed : num_computed + chunk]
        row = StepRow(token_ids=new, num_computed_tokens=num_computed, block_ids=blocks, draw=LIKELIEST)
        num_computed += len(new)
        (token,) = runner.execute([row])
        assert token is not None
        if num_computed == len(token_ids):
            token_ids.append(token.token_id)
    return token_ids[len(prompt) :]


def compute(group: RankGroup | None, path: Path, kernels: str, *, deals_experts: bool = False) -> Computed:
    runner = make_runner(path, group=group, kernels=kernels, expert_parallel_size=group.size if deals_experts else 1)
    first, second = random_sequences([50, 40])
    for sequence in (first, second):
        sequence.token_ids = [token_id % 95 for token_id in sequence.token_ids]
    for sizes in ((33, 1), (14, 30), (1, 1), (1, 7), (1, 1)):
        advance(runner, [first, second], sizes)
    prompt = [random.Random(1).randrange(90) for _ in range(2 * BLOCK_SIZE + 5)]
    blocks = list(range(8))
    answers = [greedy(runner, prompt, len(prompt), blocks), greedy(runner, prompt, 16, blocks[::-1])]
    answers.append(greedy(runner, prompt, 16, [7, 6, 30, 31], 2 * BLOCK_SIZE))  # the first blocks of the one before
    return Computed(runner.info.spec, [first.logprobs, second.logprobs], answers)


def check_equal(found: Sequence[Computed], expected: Computed) -> None:
    for each in found:
        assert each.greedy == expected.greedy
        assert each.spec.fingerprint() == expected.spec.fingerprint()
    # Only rank 0 draws, and tells logprobs.
    for ours, theirs in zip(found[0].chunked, expected.chunked, strict=True):
        assert ours.keys() == theirs.keys()
        for position, logprobs in ours.items():
            torch.testing.assert_close(logprobs, theirs[position], atol=TOLERANCE, rtol=0, equal_nan=True)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_ranks_give_what_one_rank_gives(ranks: RankProcesses, models: Path, name: str, size: int) -> None:
    path = model(models, name)
    check_equal(ranks.run(size, compute, path, ALL[-1]), compute(None, path, ALL[-1]))


@pytest.mark.parametrize(
    ("name", "kernels", "size"),
    [
        ("mixtral", ALL[-1], 2),  # 5 experts: some ranks have one more than others
        *(pytest.param(name, ALL[-1], 4, marks=pytest.mark.slow) for name in ("mixtral", "qwen3_moe")),
        pytest.param("qwen3_moe_sparse", "torch", 4, marks=pytest.mark.slow),
    ],
)
def test_experts_that_are_dealt_out_give_what_one_rank_gives(
    ranks: RankProcesses, models: Path, name: str, kernels: str, size: int
) -> None:
    path = model(models, name)
    check_equal(ranks.run(size, compute, path, kernels, deals_experts=True), compute(None, path, kernels))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "mixtral"])
def test_ranks_without_kernels_give_what_one_rank_gives(ranks: RankProcesses, models: Path, name: str) -> None:
    path = model(models, name)
    check_equal(ranks.run(2, compute, path, "torch"), compute(None, path, "torch"))


def compute_quantised(
    group: RankGroup | None, path: Path, expert_parallel_size: int = 1
) -> list[dict[int, torch.Tensor]]:
    runner = make_runner(path, group=group, expert_parallel_size=expert_parallel_size)
    (sequence,) = random_sequences([50])
    for size in (33, 14, 1, 1, 1):
        advance(runner, [sequence], [size])
    return [sequence.logprobs]


@pytest.mark.slow
@pytest.mark.skipif(ALL[-1] == "torch", reason="no kernels were built")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_weights_that_stay_quantised_are_cut_between_groups(
    ranks: RankProcesses, tmp_path: Path, architecture: str
) -> None:
    written = write_gguf(tmp_path, architecture, [Type.Q8_0, Type.Q4_0, Type.Q4_1])
    path = ensure_directory(written.file, tmp_path / "models", lambda _: None)
    (expected,) = compute_quantised(None, path)
    for size in (2, 4):
        (found,), *_ = ranks.run(size, compute_quantised, path)
        for position, logprobs in found.items():
            torch.testing.assert_close(logprobs, expected[position], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_quantised_experts_that_cannot_be_cut_can_be_dealt_out(ranks: RankProcesses, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    path = make_model(tmp_path / "model", {**FAMILIES["mixtral"], **sizes})
    pack_fp8(path)  # in squares of 128 weights
    with pytest.raises(StartupError, match=r"experts.0.w2.weight is quantised in groups of \d+ weights, which cannot"):
        ranks.run(2, compute_quantised, path)
    (expected,) = compute_quantised(None, path)
    (found,), *_ = ranks.run(2, compute_quantised, path, 2)
    for position, logprobs in found.items():
        torch.testing.assert_close(logprobs, expected[position], atol=TOLERANCE, rtol=0)


def test_a_group_that_would_be_cut_is_named(ranks: RankProcesses, tmp_path: Path) -> None:
    path = tmp_path / "awq"
    shutil.copytree(FIXTURES / "awq", path)
    (path / "tokenizer.json").write_text("{}")
    (path / "expected.safetensors").unlink()
    with pytest.raises(StartupError, match=r"down_proj.weight is quantised in groups of 32 weights, which cannot be"):
        ranks.run(2, compute_quantised, path)


def asked(
    group: RankGroup, path: Path, temperature: float, expert_parallel_size: int = 1
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    counting = CountingGroup(group)
    runner = make_runner(path, group=counting, expert_parallel_size=expert_parallel_size)
    counting.asked.clear()
    one = draw(SamplingParams(temperature=temperature, seed=3), 0)
    chunk = StepRow(token_ids=[5, 6, 7, 8, 9], num_computed_tokens=0, block_ids=[0], draw=one)
    single = StepRow(token_ids=[5], num_computed_tokens=0, block_ids=[1], draw=one)
    silent = StepRow(token_ids=[5, 6], num_computed_tokens=0, block_ids=[2])
    runner.execute([chunk, single, silent])
    return counting.asked


@pytest.mark.parametrize("name", ["mixtral", pytest.param("biases", marks=pytest.mark.slow)])
def test_collectives_of_a_step(ranks: RankProcesses, models: Path, name: str) -> None:
    """One all-reduce for the embedding and two for each of three layers, of all tokens' hidden states in the dtype of
    the stream; of the rows that draw a token, the best one of each rank, or all logits and then the tokens."""
    reduces = [("all_reduce", (8, 64), torch.float32)] * 7
    for found in ranks.run(2, asked, model(models, name), 0.0):
        assert found == [*reduces, ("all_gather", (2, 2), torch.float64)]
    for found in ranks.run(2, asked, model(models, name), 1.0):
        logits = ("all_gather", (2, VOCAB_SIZE // 2), torch.float32)
        assert found == [*reduces, logits, ("all_gather", (2,), torch.int64)]
    if name == "mixtral":  # a rank adds up what its experts give, so there is no more to exchange if they are dealt out
        for found in ranks.run(2, asked, model(models, name), 0.0, expert_parallel_size=2):
            assert found == [*reduces, ("all_gather", (2, 2), torch.float64)]


MANY_EXPERTS = {**FAMILIES["mixtral"], "num_local_experts": 16, "sliding_window": None}
LONG = 131  # tokens, more bytes than each rank adds up whole


def long_prompt(
    group: RankGroup | None, path: Path, size: int = 1
) -> tuple[list[int], list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Its answer, and what its first step exchanged."""
    counting = CountingGroup(OneRank() if group is None else group)
    runner = make_runner(path, group=counting, expert_parallel_size=size)
    prompt = [random.Random(1).randrange(90) for _ in range(LONG)]
    counting.asked.clear()
    row = StepRow(token_ids=prompt, num_computed_tokens=0, block_ids=list(range(10)), draw=LIKELIEST)
    runner.execute([row])
    collectives = list(counting.asked)
    return greedy(runner, prompt, LONG, list(range(10, 20))), collectives


@pytest.mark.parametrize(("size", "per_token"), [(2, 1), (4, 2)])
def test_results_of_many_experts_are_added_up_row_by_row(
    ranks: RankProcesses, tmp_path: Path, size: int, per_token: int
) -> None:
    """Of 16 experts: half of the ranks are asked for a token, in the mean. The tokens are those of one rank, and so few
    rows travel."""
    path = make_model(tmp_path / "many", {**MANY_EXPERTS, "num_experts_per_tok": per_token})
    expected, _ = long_prompt(None, path)
    each = -(-LONG // size)
    whole = ("all_reduce", (LONG, 64), torch.float32)
    num_rows = [0] * 3
    for answer, collectives in ranks.run(size, long_prompt, path, size):
        assert answer == expected
        assert collectives[0] == whole  # the embedding
        for layer in range(3):
            attention, rows, sums = collectives[1 + 3 * layer : 4 + 3 * layer]
            assert attention == whole
            assert (rows[0], rows[1][1], rows[2]) == ("all_to_all", 64, torch.float32)
            assert sums == ("all_gather", (each * 64,), torch.float32)
            num_rows[layer] += rows[1][0]
        assert len(collectives) == 1 + 3 * 3 + 1
    # A token asks `per_token` ranks at most; one of `size` is the one that adds it up.
    assert all(0 < num <= per_token * LONG for num in num_rows)


def drawn_twice(group: RankGroup | None, path: Path) -> list[SampledToken | None]:
    """A token drawn by chance, and one after it, asked for before it is known."""
    runner = make_runner(path, group=group)
    runner.warm_up()
    params = SamplingParams(temperature=1.0, seed=7)
    number = runner.next_number()
    before = StepRow(token_ids=[1], num_computed_tokens=0, block_ids=[3])
    row = StepRow(token_ids=[5, 6, 7], num_computed_tokens=0, block_ids=[0], draw=draw(params, 0))
    first = runner.end(runner.begin(StepInput(number=number, rows=[before, row]))).tokens
    row = StepRow(
        token_ids=[0], num_computed_tokens=3, block_ids=[0], draw=draw(params, 1), first=Drawn(step=number, row=1)
    )
    return first[1:] + runner.execute([row])


def test_a_drawn_token_is_known_to_all_ranks(ranks: RankProcesses, models: Path) -> None:
    path = model(models, "mixtral")
    expected = drawn_twice(None, path)
    assert None not in expected
    assert ranks.run(2, drawn_twice, path) == [expected] * 2


def num_blocks(group: RankGroup, path: Path) -> int:
    return make_runner(path, group=group, num_blocks=20 + group.rank).info.num_blocks


def unlike(group: RankGroup, path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        make_runner(path, group=group, block_size=16 + 16 * group.rank)
    return caught.value.message


def test_ranks_agree_before_they_serve(ranks: RankProcesses, models: Path) -> None:
    path = model(models, "mixtral")
    assert ranks.run(2, num_blocks, path) == [20, 20]
    first, second = ranks.run(2, unlike, path)
    assert first == second
    assert first.startswith("rank 1 computes KV ")
    assert "they have to be equal" in first


def bfloat16_error(group: RankGroup | None, path: Path, kernels: str, expected: dict[int, torch.Tensor]) -> float:
    runner = make_runner(path, group=group, kernels=kernels, dtype="bfloat16")
    (sequence,) = random_sequences([60])
    for size in (35, 20, 1, 1, 1, 1, 1):
        advance(runner, [sequence], [size])
    return float(torch.stack([(sequence.logprobs[at] - each).square().mean() for at, each in expected.items()]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", ALL[-1]])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_bfloat16_is_about_as_exact_as_on_one_rank(ranks: RankProcesses, models: Path, name: str, kernels: str) -> None:
    path = model(models, name)
    runner = make_runner(path)
    (exact,) = random_sequences([60])
    for size in (35, 20, 1, 1, 1, 1, 1):
        advance(runner, [exact], [size])
    alone = bfloat16_error(None, path, kernels, exact.logprobs)
    together, _ = ranks.run(2, bfloat16_error, path, kernels, exact.logprobs)
    assert together <= 1.3 * alone
