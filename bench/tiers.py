"""One prompt to its first token: its KV computed, or found on the device, in host memory, or in the store.

    python -m bench.tiers [--prompt-tokens 512] [--threads 2] [--repeats 5] [--kv-dir DIR] [--json FILE]

One engine whose cache holds one prompt; what a tier holds is arranged before the clock starts. On CPU device and host
are the same memory, so the host's figure is that of the copies and the bookkeeping.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.measure import interleave, print_table, write_json
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.loading.dtype import resolve_dtype
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from kv_store.base import ConnectorConfig
from kv_store.shared_storage.connector import SharedStorageConnector

BLOCK_SIZE = 16


class Bench:
    def __init__(self, args: argparse.Namespace, kv_dir: str) -> None:
        self._num_tokens: int = args.prompt_tokens
        settings = EngineSettings.model_validate(
            {
                "dtype": args.dtype, "device": args.device, "num_threads": args.threads, "block_size": BLOCK_SIZE,
                "num_blocks": args.prompt_tokens // BLOCK_SIZE + 2, "host_cache_gb": args.host_cache_gb,
            }
        )  # fmt: skip
        runner = LocalDevice(ensure_model(DEFAULT_MODEL, default_cache_dir(), print), settings)
        runner.warm_up()
        self._wakeup = threading.Event()
        store = SharedStorageConnector(ConnectorConfig(section={"kv_dir": kv_dir}, epoch="bench", worker_id="bench"))
        self._core = EngineCore(settings, runner, store, time.monotonic, self._wakeup.set)
        self._seed = 0

    def close(self) -> None:
        self._core.close()

    def computed(self) -> Mapping[str, float]:
        return self._figures(self._prompt(), 0)

    def device(self) -> Mapping[str, float]:
        prompt = self._prompt()
        self._first_token(prompt)
        return self._figures(prompt, self._num_full)

    def host(self) -> Mapping[str, float]:
        prompt = self._prompt()
        self._first_token(prompt)
        self._first_token(self._prompt())  # takes its place
        return self._figures(prompt, self._num_full)

    def store(self) -> Mapping[str, float]:
        prompt = self._prompt()
        self._first_token(prompt)
        self._core.blocks.reset_prefix_cache()
        return self._figures(prompt, self._num_full)

    @property
    def _num_full(self) -> int:
        return (self._num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    def _prompt(self) -> list[int]:
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randint(100, 40_000, (self._num_tokens,), generator=generator).tolist()

    def _figures(self, prompt: list[int], num_cached: int) -> Mapping[str, float]:
        seconds, found = self._first_token(prompt)
        if found != num_cached:
            raise RuntimeError(f"{found} tokens were found instead of {num_cached}")
        return {f"{self._num_tokens} tokens, ms to the first token": seconds * 1000}

    def _first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and the tokens that were found. Returns when what was computed is in the store."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        self._core.handle(m.AddRequest(request_id="r", prompt_token_ids=prompt, sampling_params=params))
        tokens: list[m.TokensGenerated] = []
        while not tokens:
            self._step()
            tokens = [event for event in self._core.take_events() if isinstance(event, m.TokensGenerated)]
        seconds = time.perf_counter() - start
        while self._core.load.num_unstored_blocks:
            self._step()
        return seconds, tokens[0].num_cached_tokens

    def _step(self) -> None:
        self._wakeup.clear()
        if not self._core.step():
            self._wakeup.wait(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--host-cache-gb", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-dir", help="of the store; a temporary directory if unset")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.dtype = resolve_dtype(args.dtype, ensure_model(DEFAULT_MODEL, default_cache_dir(), print), args.device).dtype
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, args.kv_dir or folder)
        ways: dict[str, Callable[[], Mapping[str, float]]] = {
            "computed": bench.computed, "device": bench.device, "host": bench.host, "store": bench.store,
        }  # fmt: skip
        try:
            rows = interleave(ways, args.repeats)
        finally:
            bench.close()
    print_table(f"{DEFAULT_MODEL}, {args.dtype}, {args.device}", rows, ratio=("store", "host"))
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
