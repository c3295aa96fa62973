"""What speculation is worth: the same requests with it and without, in turn, in one engine.

    python -m bench.speculation [--speculation ngram] [--batches 1,8] [--repeats 5] [--dtype bfloat16] [--threads 1]
    python -m bench.speculation --speculation smollm2-135m-instruct --zero-layers 60

SmolLM2-135M copies a list ("repeating", greedy) and writes a story ("ordinary", drawn with temperature 1). Seconds are
CPU time of the process, so that other work on the machine counts little. Both ways draw the same tokens, which is
checked. Each repetition is a pair, one run with speculation and one without: the table has the median and the quartiles
of the pairs' ratios. Every repetition takes the same steps, so the table also has a ratio of two sums, in which each
step counts with the fastest of its repetitions.

`--zero-layers N` gives the model N more layers that cost as much as its own and change nothing. The model without them
can then be its draft model. Its guesses come true far more often than those of a draft model that was trained by
itself: the acceptance is artificial, and the cost is real.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.local.drafter import load_drafter
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector

LIST = "\n".join(
    f"- parcel {number}: weight {3 * number % 17} kg, paid, sent to depot {number % 4}" for number in range(12)
)
PROMPTS = {
    "repeating": f"{LIST}\n\n{LIST}\n\n- parcel 0:",
    "ordinary": "The lighthouse keeper had not expected to find a machine on the beach that morning. It was",
}


@dataclass(slots=True)
class Run:
    tokens: list[int] = field(default_factory=list)  # of all answers, one answer after the other
    step_seconds: list[float] = field(default_factory=list)  # CPU time; steps after the first token of each answer
    num_drafted: int = 0
    num_accepted: int = 0


class Measured:
    """An engine, and what its answers took."""

    def __init__(self, model_dir: Path, args: argparse.Namespace) -> None:
        settings = EngineSettings.model_validate(
            {
                "model": str(model_dir),
                "device": "cpu",
                "dtype": args.dtype,
                "quantization": args.quantization,
                "num_threads": args.threads,
                "num_blocks": 512,
                "enable_prefix_caching": False,
                "speculation": args.speculation,
            }
        )
        runner = LocalDevice(model_dir, settings)
        runner.warm_up()
        connector = MemoryConnector(ConnectorConfig(epoch="bench", worker_id="bench"))
        drafter = load_drafter(settings, runner)
        self._core = EngineCore(settings, runner, connector, time.monotonic, lambda: None, drafter=drafter)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._num_runs = 0
        self.num_tokens: int = args.tokens

    def answer(self, text: str, batch: int, *, speculate: bool) -> Run:
        self._num_runs += 1
        for number in range(batch):
            params = SamplingParams(
                temperature=0.0 if text == "repeating" else 1.0,
                seed=number,
                max_tokens=self.num_tokens,
                ignore_eos=True,
                speculate=speculate,
            )
            self._core.handle(
                m.AddRequest(
                    request_id=str(number),
                    prompt_token_ids=self._tokenizer.encode(PROMPTS[text], add_special_tokens=False).ids,
                    sampling_params=params,
                    cache_salt=f"{self._num_runs} {number}",  # a draft model finds no prompt in its prefix cache
                )
            )
        run = Run()
        answers: dict[str, list[int]] = {}
        start = None
        while self._core.step():
            if start is not None:
                now = time.process_time()
                run.step_seconds.append(now - start)
                start = now
            for event in self._core.take_events():
                if isinstance(event, m.TokensGenerated):
                    answers.setdefault(event.request_id, []).extend(token.token_id for token in event.tokens)
                    if event.finish_reason is not None:
                        run.num_drafted += event.num_drafted_tokens
                        run.num_accepted += event.num_accepted_tokens
            if start is None and len(answers) == batch:
                start = time.process_time()
        run.tokens = [token for number in range(batch) for token in answers[str(number)]]
        return run


def compare(measured: Measured, text: str, batch: int, repeats: int) -> str:
    """A line of the table. Raises `RuntimeError` if an answer is not always the same."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for number in range(repeats):
        for speculate in (True, False) if number % 2 else (False, True):
            runs[speculate].append(measured.answer(text, batch, speculate=speculate))
    if any(run.tokens != runs[False][0].tokens for run in runs[True] + runs[False]):
        raise RuntimeError("speculation changed an answer")
    seconds = {way: [sum(run.step_seconds) for run in runs[way]] for way in runs}
    fastest = {way: sum(map(min, zip(*(run.step_seconds for run in runs[way]), strict=True))) for way in runs}
    ratios = [without / with_ for without, with_ in zip(seconds[False], seconds[True], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if repeats > 1 else ratios * 3
    rate = batch * (measured.num_tokens - 1) / statistics.median(seconds[False])
    last = runs[True][-1]
    return (
        f"{text:9}, batch {batch}: {median:.2f} x [{low:.2f} to {high:.2f}] of {rate:.0f} tokens/s, "
        f"{fastest[False] / fastest[True]:.3f} x by each step's fastest; "
        f"{last.num_accepted} of {last.num_drafted} drafted tokens accepted"
    )


def write_longer(model_dir: Path, num_more: int, folder: Path) -> None:
    """A Llama with `num_more` further layers: copies of its own ones that write zeros."""
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    num_own = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_own + num_more
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(model_dir / "model.safetensors")
    for name, tensor in list(weights.items()):
        start, layers, rest = name.partition("model.layers.")
        number, _, weight = rest.partition(".")
        for new in range(num_own + int(number), num_own + num_more, num_own) if layers else ():
            is_output = weight in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"{start}{layers}{new}.{weight}"] = torch.zeros_like(tensor) if is_output else tensor.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as the worker's setting")
    parser.add_argument("--speculation", default="ngram", help="as the worker's setting")
    parser.add_argument("--zero-layers", type=int, default=0, help="more layers of the model, a Llama in one file")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(ensure_model(args.model, default_cache_dir(), print))
        if args.zero_layers:
            write_longer(model_dir, args.zero_layers, Path(scratch) / "longer")
            model_dir = Path(scratch) / "longer"
        measured = Measured(model_dir, args)
    longer = f" with {args.zero_layers} layers of zeros" if args.zero_layers else ""
    print(
        f"{args.model}{longer}, {args.speculation}, {args.dtype}, quantization {args.quantization}, "
        f"{args.threads} thread(s), CPU time"
    )
    for text in PROMPTS:
        for batch in args.batches:
            print(compare(measured, text, batch, args.repeats), flush=True)


if __name__ == "__main__":
    main()
