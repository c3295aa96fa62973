"""A model whose tokenizer alone names the end of a turn ends its answers there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from common.sampling import SamplingOptions
from tests.chaos.tiny_model import write_tiny_model
from tests.engine.tiny_models import edit_config
from tests.router.tiny_tokenizer import eos_id, ids_of, tokenizer_files

OTHER_END = 0  # what config.json names
PROMPT = ids_of("hello world")


def test_both_ends_are_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path, max_len=256)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_bytes(tokenizer_files()["tokenizer_config.json"])
    edit_config(tmp_path, eos_token_id=OTHER_END)
    with caplog.at_level(logging.INFO):
        llm = LLM(str(tmp_path), dtype="float32", num_threads=1, num_blocks=64, block_size=16)
    (record,) = [one for one in caplog.records if one.message == "tokens that end an answer"]
    assert vars(record)["ends"] == f"{OTHER_END} of config.json; {eos_id()} of tokenizer_config.json"
    with llm:
        for end in (OTHER_END, eos_id()):
            asked: SamplingOptions = {"temperature": 0, "max_tokens": 5, "logit_bias": {end: 100.0}}
            further: tuple[SamplingOptions, ...] = ({}, {"min_tokens": 3}, {"ignore_eos": True})
            plain, early, ignoring = (
                llm.generate(PROMPT, SamplingParams(**(asked | more)), use_tqdm=False)[0].outputs[0] for more in further
            )
            assert (plain.token_ids, plain.finish_reason) == ([end], "stop")
            assert end not in early.token_ids[:3]
            assert early.token_ids[3] == end
            assert (ignoring.token_ids, ignoring.finish_reason) == ([end] * 5, "length")
            guided = SamplingParams(**(asked | {"guided": {"regex": "[0-9]*"}}))
            (output,) = llm.generate(PROMPT, guided, use_tqdm=False)
            assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")


def test_an_end_outside_the_vocabulary_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path, max_len=256)
    edit_config(tmp_path, eos_token_id=[OTHER_END, 100_000])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with LLM(str(tmp_path), dtype="float32", num_threads=1, num_blocks=64, block_size=16) as llm:
        asked = SamplingParams(temperature=0, max_tokens=5, logit_bias={OTHER_END: 100.0})
        assert llm.generate(PROMPT, asked, use_tqdm=False)[0].outputs[0].token_ids == [OTHER_END]
    assert "outside the model's vocabulary are ignored" in caplog.text
