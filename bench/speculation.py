"""What speculation is worth: the same requests with it and without, in turn, in one engine.

    python -m bench.speculation [--speculation ngram] [--batches 1,8] [--repeats 5] [--dtype bfloat16] [--threads 1]

SmolLM2-135M copies a list ("repeating", greedy) and writes a story ("ordinary", drawn with temperature 1). Seconds are
CPU time of the process, so that other work on the machine counts little. Both ways draw the same tokens, which is
checked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer

from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.embedded_model import ensure_model
from engine.model_runner import ModelRunner
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector

LIST = "\n".join(
    f"- parcel {number}: weight {3 * number % 17} kg, paid, sent to depot {number % 4}" for number in range(12)
)
PROMPTS = {
    "repeating": f"{LIST}\n\n{LIST}\n\n- parcel 0:",
    "ordinary": "The lighthouse keeper had not expected to find a machine on the beach that morning. It was",
}
NUM_TOKENS = 160


class Measured:
    """An engine, and what its answers took."""

    def __init__(self, args: argparse.Namespace) -> None:
        path = Path(ensure_model(DEFAULT_MODEL, default_cache_dir(), print))
        settings = EngineSettings.model_validate(
            {
                "device": "cpu",
                "dtype": args.dtype,
                "quantization": args.quantization,
                "num_threads": args.threads,
                "num_blocks": 512,
                "enable_prefix_caching": False,
                "speculation": args.speculation,
            }
        )
        runner = ModelRunner(path, settings)
        runner.warm_up()
        connector = MemoryConnector(ConnectorConfig(epoch="bench", worker_id="bench"))
        self._core = EngineCore(settings, runner, connector, time.monotonic, lambda: None)
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def answer(self, text: str, batch: int, *, speculate: bool) -> tuple[float, list[int], int, int]:
        """CPU seconds of all tokens after the first of each answer; the tokens; how many were drafted and accepted."""
        for number in range(batch):
            params = SamplingParams(
                temperature=0.0 if text == "repeating" else 1.0,
                seed=number,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                speculate=speculate,
            )
            prompt = self._tokenizer.encode(PROMPTS[text], add_special_tokens=False).ids
            self._core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
        answers: dict[str, list[int]] = {}
        start = None
        drafted = accepted = 0
        while self._core.step():
            for event in self._core.take_events():
                if isinstance(event, m.TokensGenerated):
                    answers.setdefault(event.request_id, []).extend(token.token_id for token in event.tokens)
                    if event.finish_reason is not None:
                        drafted += event.num_drafted_tokens
                        accepted += event.num_accepted_tokens
            if start is None and len(answers) == batch:
                start = time.process_time()
        if start is None:
            raise RuntimeError("no answer")
        seconds = time.process_time() - start
        return seconds, [token for number in range(batch) for token in answers[str(number)]], drafted, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculation", default="ngram", help="as the worker's setting")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    measured = Measured(args)
    print(f"{args.speculation}, {args.dtype}, quantization {args.quantization}, {args.threads} thread(s), CPU time")
    for text in PROMPTS:
        for batch in args.batches:
            ratios, rates = [], []
            for number in range(args.repeats):
                order = (True, False) if number % 2 else (False, True)
                runs = {on: measured.answer(text, batch, speculate=on) for on in order}
                (with_s, with_tokens, drafted, accepted), (without_s, without_tokens, _, _) = runs[True], runs[False]
                if with_tokens != without_tokens:
                    raise RuntimeError("speculation changed an answer")
                ratios.append(without_s / with_s)
                rates.append(batch * (NUM_TOKENS - 1) / without_s)
            print(
                f"{text:9}, batch {batch}: {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}) "
                f"of {statistics.median(rates):.0f} tokens/s; {accepted} of {drafted} drafted tokens accepted"
            )


if __name__ == "__main__":
    main()
