"""Beam search across a prefill and a decode worker finds what transformers' does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest
from transformers import LlamaForCausalLM

from baton import LLM, BeamSearchParams
from tests.baton.test_beam_search import MAX_TOKENS, of_transformers
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.stack import Fleet, running
from tests.router.tiny_tokenizer import tiny_tokenizer, vocab_size

PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((90, 3))]
CASES = [(2, 1.0, True), (5, 0.0, False), (8, 1.0, False), (3, -1.0, True)]


@pytest.mark.slow
def test_the_beams_of_transformers(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_tiny_model(model_dir, max_len=512, initializer_range=0.08)
    ends = list(range(0, vocab_size(), vocab_size() // 11))[:12]
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": ends[0]}))
    model = LlamaForCausalLM.from_pretrained(model_dir)
    fleet = Fleet(tmp_path, f"--model={model_dir}", prefill=1, decode=1)
    reasons: set[str] = set()
    with running(fleet), LLM(target=fleet.grpc) as llm:
        for width, penalty, early in CASES:
            params = BeamSearchParams(
                beam_width=width, max_tokens=MAX_TOKENS, length_penalty=penalty, early_stopping=early
            )
            outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early}
                wanted, scores = of_transformers(model, prompt, **options)
                assert [one.tokens for one in output.sequences] == wanted
                lengths = [len(tokens) - len(prompt) for tokens in wanted]
                got = [one.cum_logprob / length**penalty for one, length in zip(output.sequences, lengths, strict=True)]
                assert got == pytest.approx(scores, abs=1e-4)
                reasons |= {one.finish_reason for one in output.sequences}
                body = {"prompt": prompt, "n": width, "use_beam_search": True, "max_tokens": MAX_TOKENS} | {
                    "length_penalty": penalty,
                    "early_stopping": early,
                }
                answer = httpx.post(f"{fleet.http}/v1/completions", json=body, timeout=60).json()
                texts = [tiny_tokenizer().decode(tokens[len(prompt) :]).rstrip("\ufffd") for tokens in wanted]
                assert [choice["text"] for choice in answer["choices"]] == texts
        with fleet.client() as client:
            fresh = client.generate(random_prompt(random.Random(9), 90), n=4, use_beam_search=True, max_tokens=3)
            report = fresh.result().report
    assert "stop" in reasons
    assert report.prefill_worker
    assert report.num_blocks_moved > 0
