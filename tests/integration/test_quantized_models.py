"""A GGUF file, quantised checkpoints and others, each split over a prefill and a decode worker of too few blocks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from baton.client.report import Result
from baton.client.sync_client import Client
from tests.engine.gguf_files import write_gguf
from tests.engine.test_model_gguf import MIXED
from tests.engine.test_model_quantized import FIXTURES, dequantized, matrices
from tests.engine.test_model_text_part import make
from tests.engine.tiny_models import VOCAB_SIZE, edit_config
from tests.integration.stack import Fleet, running
from tests.models.test_transformers_models import make_mxfp4, widened
from tests.nixl import skip_without_nixl
from tests.router.tiny_tokenizer import endless_tokenizer_files

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 50  # that are compared
NUM_ANSWER_TOKENS = 120  # so many that requests run at one time, however long their prompts are on their way
NUM_ROUNDS = 20
LENGTHS = (40, 75, 131, 110)
NUM_BLOCKS = 26  # the prompts take 24, the answers 30 more; the two longest alone take 31
MARGIN = 0.01  # of logits, which are within 1e-3 of the dequantised model's (tests/engine)


def gguf_model(folder: Path) -> tuple[Path, Path]:
    """What to serve, and the dequantised model."""
    written = write_gguf(folder, "qwen3", MIXED)
    return written.file, written.reference


def checkpoint(name: str, folder: Path) -> tuple[Path, Path]:
    path, plain = folder / name, folder / "plain"
    shutil.copytree(FIXTURES / name, path, ignore=shutil.ignore_patterns("expected.safetensors"))
    for file, content in endless_tokenizer_files().items():
        (path / file).write_bytes(content)
    shutil.copytree(path, plain)
    edit_config(plain, quantization_config=None)
    tensors = {key: dequantized(tensor).contiguous() for key, tensor in matrices(path).items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return path, plain


def sinks(folder: Path) -> tuple[Path, Path]:
    """With windows of some layers, and experts in mxfp4, on transformers' code."""
    path, plain = make_mxfp4(folder / "model"), folder / "plain"
    for file, content in endless_tokenizer_files().items():
        (path / file).write_bytes(content)
    shutil.copytree(path, plain)
    edit_config(plain, quantization_config=None)
    tensors = {name: tensor.contiguous() for name, tensor in widened(path).state_dict().items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return path, plain


def text_part(folder: Path) -> tuple[Path, Path]:
    path = make(folder / "model", "gemma3")
    for file, content in endless_tokenizer_files().items():
        (path / file).write_bytes(content)
    return path, path


# Of each project that packs checkpoints, and of each kind of scale; what it has beside is for the engine's tests.
MODELS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "gguf": gguf_model,
    **{name: partial(checkpoint, name) for name in ("awq", "gptq-4", "w8a16", "fp8")},
    "sinks": sinks,
    "text part": text_part,
}


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Up to the first token that rounding could decide."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        first, second = best.values.tolist()
        if first - second < MARGIN:
            break
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("connector", ["nixl", "shared_storage"])
@pytest.mark.parametrize("kind", MODELS)
def test_split_preempted_and_from_the_prefix_cache(tmp_path: Path, kind: str, connector: str) -> None:
    skip_without_nixl(connector)
    model, plain = MODELS[kind](tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    rng = random.Random(kind)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    wanted = [greedy(reference, prompt) for prompt in prompts]
    assert sum(map(len, wanted)) > NUM_TOKENS * len(prompts) / 2
    flags = (
        f"--model={model}",
        f"--connector={connector}",
        f"--num-blocks={NUM_BLOCKS}",
        "--chunk-size=64",
        "--dtype=float32",
        f"--cache-dir={tmp_path / 'cache'}",
    )

    def ask(client: Client, prompt: list[int]) -> Result:
        return client.generate(prompt, temperature=0.0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True).result()

    fleet = Fleet(tmp_path, *flags, prefill=1, decode=1, router_flags=["--min-remote-tokens=1"])
    with running(fleet), fleet.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        results: list[Result] = []
        for _ in range(NUM_ROUNDS):  # on a busy machine an answer may be at its end before the next prompt is there
            answers = list(pool.map(lambda prompt: ask(client, prompt), prompts))
            results += answers
            if sum(result.report.num_preemptions for result in answers) > 0:
                break
        else:
            pytest.fail(f"no request was preempted in {NUM_ROUNDS} rounds")
        assert all(result.report.prefill_worker for result in results[: len(prompts)])
        fresh, again = ask(client, prompts[2]), ask(client, prompts[2])
        assert again.usage.cached_tokens > 100
        rounds = len(results) // len(prompts)
        for result, expected in zip([*results, fresh, again], [*wanted * rounds, wanted[2], wanted[2]], strict=True):
            assert list(result.token_ids[: len(expected)]) == expected
        fleet.settle()
