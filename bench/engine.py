"""The engine alone against transformers' `generate`: same weights, dtype, threads and prompts, in turn in one process.

    python -m bench.engine [--dtype auto] [--threads 2] [--repeats 5] [--json FILE]

Prefill: one prompt of 512 tokens to its first token. Decode: 128 new tokens after prompts of 512, batch 1 and 8; the
time of the prompts is measured apart and taken off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.measure import interleave, print_table, write_json
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.dtype import resolve_dtype
from engine.embedded_model import ensure_model
from engine.model_runner import ModelRunner
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector


def random_prompts(batch_size: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Token ids that no prefix cache has seen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (batch_size, num_tokens), generator=generator).tolist()


class BatonEngine:
    def __init__(self, model_dir: Path, dtype: str, threads: int) -> None:
        settings = EngineSettings.model_validate(
            {
                "device": "cpu",
                "dtype": dtype,
                "num_threads": threads,
                "enable_prefix_caching": False,
                "max_num_batched_tokens": 4096,
            }
        )
        runner = ModelRunner(model_dir, settings)
        connector = MemoryConnector(ConnectorConfig(epoch="bench", worker_id="bench"))
        self._core = EngineCore(settings, runner, connector, time.monotonic, lambda: None)

    def generate(self, prompts: list[list[int]], num_new: int) -> float:
        """Seconds until every prompt has `num_new` tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
        num_tokens = 0
        while self._core.step():
            num_tokens += sum(isinstance(event, m.TokensGenerated) for event in self._core.take_events())
        if num_tokens != num_new * len(prompts):
            raise RuntimeError(f"{num_tokens} tokens instead of {num_new * len(prompts)}")
        return time.perf_counter() - start


class Transformers:
    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_new: int) -> float:
        """Seconds until every prompt has `num_new` tokens."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
        if out.shape[1] != ids.shape[1] + num_new:
            raise RuntimeError(f"{out.shape[1] - ids.shape[1]} tokens instead of {num_new}")
        return time.perf_counter() - start


def measure(system: BatonEngine | Transformers, args: argparse.Namespace, seeds: list[int]) -> Mapping[str, float]:
    figures: dict[str, float] = {}
    for batch_size in (1, 8):
        seeds[0] += 1
        prompts = random_prompts(batch_size, args.prompt_tokens, seeds[0])
        first = system.generate(prompts, 1)
        whole = system.generate(prompts, args.new_tokens + 1)
        figures[f"prefill tokens/s, batch {batch_size}"] = batch_size * args.prompt_tokens / first
        if batch_size == 1:
            figures["TTFT ms, batch 1"] = first * 1000
        figures[f"decode tokens/s, batch {batch_size}"] = batch_size * args.new_tokens / (whole - first)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model_dir = ensure_model(args.model, default_cache_dir(), print)
    args.dtype = resolve_dtype(args.dtype, model_dir, "cpu").dtype
    baton, peer = BatonEngine(model_dir, args.dtype, args.threads), Transformers(model_dir, args.dtype)
    seeds = {"baton": [0], "transformers": [0]}
    rows = interleave(
        {
            "baton": lambda: measure(baton, args, seeds["baton"]),
            "transformers": lambda: measure(peer, args, seeds["transformers"]),
        },
        args.repeats,
    )
    print_table(
        f"{args.dtype}, {args.threads} threads, {args.prompt_tokens} prompt and {args.new_tokens} new tokens",
        rows,
        ratio=("baton", "transformers"),
    )
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
