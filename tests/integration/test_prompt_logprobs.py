"""Logprobs of a prompt are transformers' own, in float32, across a prefill and a decode worker too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from common.config import DEFAULT_MODEL
from tests.integration.ask import Salt
from tests.integration.prompts import BY_NAME
from tests.integration.stack import CALL_TIMEOUT_S, Stack

pytestmark = pytest.mark.timeout(600)

PROMPT = BY_NAME["ledger-250"].prompt
REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
token_ids = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.inference_mode():
    logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
own = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
print(json.dumps([own.tolist(), logprobs.amax(-1).tolist()]))
"""


def computed_by_transformers(model_dir: Path, token_ids: list[int]) -> tuple[list[float], list[float]]:
    """(logprobs of all tokens but the first, those of the likeliest in their places)."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REFERENCE, str(model_dir)]
    done = subprocess.run(
        command, input=json.dumps(token_ids), capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    own, best = json.loads(done.stdout)
    return own, best


def test_across_two_workers(two: Stack, model_dir: Path, salt: Salt) -> None:
    """The prompt is cached at both workers, and computed nevertheless. Answers are the same with and without."""
    cache_salt = salt()
    with two.client() as client:
        token_ids = client.tokenize(PROMPT) if isinstance(PROMPT, str) else list(PROMPT)
        plain = client.generate(token_ids, temperature=0, max_tokens=8, cache_salt=cache_salt).result()
        assert plain.report.prefill_worker
        scored = client.generate(
            token_ids, temperature=0, max_tokens=8, prompt_logprobs=1, logprobs=1, cache_salt=cache_salt
        ).result()
    assert (scored.token_ids, scored.report.prefill_worker, scored.usage.cached_tokens) == (plain.token_ids, "", 0)
    own, best = computed_by_transformers(model_dir, [*token_ids, *scored.token_ids])
    tokens = [*scored.prompt_logprobs, *scored.logprobs]
    assert [one.token_id for one in tokens] == [*token_ids[1:], *scored.token_ids]
    assert [one.logprob for one in tokens] == pytest.approx(own, abs=1e-4)
    assert [one.top_logprobs[0].logprob for one in tokens] == pytest.approx(best, abs=1e-4)


def test_several_answers_to_one_prompt(two: Stack, salt: Salt) -> None:
    """The first one computes and scores it, the others find it computed."""
    with two.client() as client:
        token_ids = client.tokenize(PROMPT) if isinstance(PROMPT, str) else list(PROMPT)
        options = {"seed": 3, "max_tokens": 8, "prompt_logprobs": 1, "ignore_eos": True}
        results = client.generate(token_ids, n=4, cache_salt=salt(), **options).results()  # type: ignore[arg-type]
        alone = client.generate(token_ids, cache_salt=salt(), **options).result()  # type: ignore[arg-type]
    assert [len(result.prompt_logprobs) for result in results] == [len(token_ids) - 1] * 4
    assert len({result.prompt_logprobs for result in results}) == 1
    assert [one.token_id for one in results[0].prompt_logprobs] == token_ids[1:]
    assert [one.logprob for one in results[0].prompt_logprobs] == pytest.approx(
        [one.logprob for one in alone.prompt_logprobs], abs=1e-5
    )
    assert results[0].token_ids == alone.token_ids
    block_size = 16
    num_full = (len(token_ids) - 1) // block_size * block_size
    assert [result.usage.cached_tokens for result in results] == [0, *([num_full] * 3)]


def test_as_harnesses_ask(two: Stack, model_dir: Path) -> None:
    """A batch of token ids with `echo`, over REST."""
    with two.client() as client:
        texts = ("The capital of France is Paris", "Water boils at a hundred degrees")
        prompts = [client.tokenize(text) for text in texts]
    with openai.OpenAI(base_url=f"{two.http}/v1", api_key="none", timeout=CALL_TIMEOUT_S, max_retries=0) as rest:
        answer = rest.completions.create(
            model=DEFAULT_MODEL, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234
        )
    for text, token_ids, choice in zip(texts, prompts, answer.choices, strict=True):
        assert choice.text.startswith(text)
        assert choice.logprobs is not None
        own, best = computed_by_transformers(model_dir, token_ids)
        scores, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert scores is not None
        assert tops is not None
        assert scores[0] is None
        assert scores[1:-1] == pytest.approx(own, abs=1e-4)
        assert [max(top.values()) for top in tops[1:-1]] == pytest.approx(best, abs=1e-4)
