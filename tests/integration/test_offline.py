"""`LLM` across a prefill and a decode worker answers as it does in one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from tests.chaos.tiny_model import random_prompt
from tests.integration.stack import running
from tests.integration.tiny import tiny_fleet


def test_across_two_workers(tmp_path: Path) -> None:
    prompts = [random_prompt(random.Random(number), length) for number, length in enumerate((90, 3, 200, 40))]
    params = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(n=3, seed=5, temperature=0.8, top_k=2)] * 2
    fleet = tiny_fleet(tmp_path, prefill=1, decode=1)
    with LLM(str(tmp_path / "model"), dtype="float32", num_threads=1, num_blocks=256) as llm:
        wanted = llm.generate(prompts, params, use_tqdm=False)
        vectors = llm.embed(prompts, use_tqdm=False)
    with running(fleet), LLM(target=fleet.grpc) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        across = llm.embed(prompts, use_tqdm=False)
        with fleet.client() as client:
            moved = client.generate(random_prompt(random.Random(9), 90), max_tokens=2).result().report.num_blocks_moved
    assert [output.outputs for output in outputs] == [output.outputs for output in wanted]
    for one, other in zip(vectors, across, strict=True):
        assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-4)
    assert moved  # prefill and decode are on workers of their own
