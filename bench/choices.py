"""What n answers to one prompt cost, against n requests that share nothing: `python -m bench.choices`.

An engine in this process, the embedded model. Prompt blocks are the most KV blocks that were owned at a time, up to the
step of the last first token; CPU time, not wall time, so that neighbours disturb little.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping

from bench.measure import interleave, print_table
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from kv_store.no_store import NoStore


class Choices:
    def __init__(self, core: EngineCore, num_choices: int, num_prompt_tokens: int, max_tokens: int) -> None:
        self._core = core
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._rng = random.Random(1)

    def one(self) -> Mapping[str, float]:
        return self._run([self._prompt()])

    def to_one_prompt(self) -> Mapping[str, float]:
        return self._run([self._prompt()] * self._num_choices)

    def unlike(self) -> Mapping[str, float]:
        return self._run([self._prompt() for _ in range(self._num_choices)])

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(1000, 40000) for _ in range(self._num_prompt_tokens)]

    def _run(self, prompts: list[list[int]]) -> Mapping[str, float]:
        core = self._core
        start, cpu_start = time.monotonic(), time.process_time()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(seed=number, max_tokens=self._max_tokens, ignore_eos=True)
            core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
        begun: set[str] = set()
        prompt_blocks = computed = 0
        prompts_done_s = 0.0
        while core.has_work:
            output = core.prepare()
            if len(begun) < len(prompts):
                prompt_blocks = max(prompt_blocks, core.blocks.num_blocks - core.blocks.num_available_blocks)
                computed += sum(output.num_tokens.values())
            core.end(core.begin(output))
            begun |= {event.request_id for event in core.take_events() if isinstance(event, m.TokensGenerated)}
            core.take_block_news()
            if len(begun) == len(prompts) and not prompts_done_s:
                prompts_done_s = time.monotonic() - start
        return {
            "prompt blocks": prompt_blocks,
            "tokens computed until all have a first token": computed,
            "last first token, s": prompts_done_s,
            "all answers, s": time.monotonic() - start,
            "all answers, CPU s": time.process_time() - cpu_start,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    settings = EngineSettings(num_blocks=1024, num_threads=given.threads)
    runner = LocalDevice(ensure_model(DEFAULT_MODEL, default_cache_dir(), print), settings)
    runner.warm_up()
    core = EngineCore(settings, runner, NoStore(), time.monotonic, lambda: None)
    choices = Choices(core, given.choices, given.prompt_tokens, given.max_tokens)
    many, unlike = f"n={given.choices}", f"{given.choices} requests"
    rows = interleave({"n=1": choices.one, many: choices.to_one_prompt, unlike: choices.unlike}, given.repeats)
    print_table(
        f"{given.prompt_tokens} prompt tokens, {given.max_tokens} tokens of each answer", rows, ratio=(many, "n=1")
    )
    core.close()


if __name__ == "__main__":
    main()
