"""What a beam search costs, against as many greedy requests that share nothing: `python -m bench.beams`.

An engine in this process, the embedded model; the search asks it as a router does. CPU time, not wall time, so that
neighbours disturb little.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence

from bench.measure import interleave, print_table
from common.beam_search import BeamSearch, BeamSearchParams
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from common.types import TokenLogprob
from engine import messages as m
from engine.core import EngineCore
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from kv_store.no_store import NoStore


class Beams:
    def __init__(self, core: EngineCore, width: int, num_prompt_tokens: int, max_tokens: int) -> None:
        self._core = core
        self._width = width
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._rng = random.Random(1)
        self._most_blocks = 0  # that were owned at a time
        self._num_computed = 0

    def search(self) -> Mapping[str, float]:
        start = self._begin()
        prompt = self._prompt()
        params = BeamSearchParams(beam_width=self._width, max_tokens=self._max_tokens, ignore_eos=True)
        found = BeamSearch(params, ())
        asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=found.num_next)
        while found.running:
            found.advance(self._run([[*prompt, *beam.token_ids] for beam in found.running], asked))
        return self._figures(start)

    def greedy(self) -> Mapping[str, float]:
        start = self._begin()
        asked = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        self._run([self._prompt() for _ in range(self._width)], asked)
        return self._figures(start)

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(1000, 40000) for _ in range(self._num_prompt_tokens)]

    def _begin(self) -> tuple[float, float]:
        self._most_blocks = self._num_computed = 0
        return time.monotonic(), time.process_time()

    def _figures(self, start: tuple[float, float]) -> Mapping[str, float]:
        return {
            "KV blocks, at most": self._most_blocks,
            "tokens computed": self._num_computed,
            "seconds": time.monotonic() - start[0],
            "CPU seconds": time.process_time() - start[1],
        }

    def _run(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[tuple[TokenLogprob, ...]]:
        """Answers the prompts. Returns for each one the likeliest tokens at the place of its answer's last token."""
        core = self._core
        for number, prompt in enumerate(prompts):
            core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
        last: dict[str, tuple[TokenLogprob, ...]] = {}
        while core.has_work:
            output = core.prepare()
            self._most_blocks = max(self._most_blocks, core.blocks.num_blocks - core.blocks.num_available_blocks)
            self._num_computed += sum(output.num_tokens.values())
            core.end(core.begin(output))
            for event in core.take_events():
                if isinstance(event, m.TokensGenerated):
                    last[event.request_id] = event.tokens[-1].top_logprobs
            core.take_block_news()
        return [last[str(number)] for number in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    settings = EngineSettings(
        num_blocks=16384 // given.block_size, block_size=given.block_size, num_threads=given.threads
    )
    runner = LocalDevice(ensure_model(DEFAULT_MODEL, default_cache_dir(), print), settings)
    runner.warm_up()
    core = EngineCore(settings, runner, NoStore(), time.monotonic, lambda: None)
    beams = Beams(core, given.beams, given.prompt_tokens, given.max_tokens)
    search, greedy = f"{given.beams} beams", f"{given.beams} greedy requests"
    rows = interleave({search: beams.search, greedy: beams.greedy}, given.repeats)
    title = f"{given.prompt_tokens} prompt tokens, {given.max_tokens} tokens of each, blocks of {given.block_size}"
    print_table(title, rows, ratio=(search, greedy))
    core.close()


if __name__ == "__main__":
    main()
