"""What transformers answers: greedy, float32, one prompt at a time. Slow, so it is computed once and kept.

`python -m tests.integration.reference MODEL_DIR NAME...` prints the answers to some prompts; processes of their own, so
that neither torch nor the warnings of other libraries come into the tests' own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.model_files import model_identity
from tests.integration.prompts import BY_NAME, CASES, Case

NUM_PROCESSES = 2


@dataclass(slots=True, frozen=True)
class Expected:
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    text: str  # of the output, without special tokens
    margins: list[float]  # of each output token: its logit less the second best; near 0 is a tie

    def explain(self, output_token_ids: Sequence[int]) -> str:
        """Where an answer differs, and whether that is a tie; empty if it is equal."""
        if list(output_token_ids) == self.output_token_ids:
            return ""
        pairs = zip(output_token_ids, self.output_token_ids, strict=False)
        at = next((index for index, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if at is None:
            return f"{len(output_token_ids)} tokens instead of {len(self.output_token_ids)}"
        got, wanted = output_token_ids[at], self.output_token_ids[at]
        return f"token {at} is {got}, not {wanted}, which wins by {self.margins[at]:.2g}"


def cache_key(model_dir: Path) -> str:
    """Equal if the answers are."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "torch")]
    tokenizer = hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    text = json.dumps([versions, model_identity(model_dir), tokenizer, [asdict(case) for case in CASES]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(model_dir: Path, cache_dir: Path) -> dict[str, Expected]:
    """Expected answers by the name of their case."""
    file = cache_dir / f"{cache_key(model_dir)}.json"
    if not file.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(_computed_elsewhere(model_dir)))
        partial.rename(file)
    return {name: Expected(**fields) for name, fields in json.loads(file.read_text()).items()}


def _computed_elsewhere(model_dir: Path) -> dict[str, dict[str, object]]:
    """In processes of one thread each, which share a busy machine better than threads do."""
    names = [case.name for case in sorted(CASES, key=lambda case: (case.max_tokens, len(case.prompt)))]
    command = [sys.executable, "-m", "tests.integration.reference", str(model_dir)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, *names[start::NUM_PROCESSES]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
        for start in range(NUM_PROCESSES)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors.decode()[-4000:]
    found = [json.loads(output) for output, _ in outputs]
    return {name: fields for part in found for name, fields in part.items()}


def compute(model_dir: Path, cases: Sequence[Case]) -> dict[str, Expected]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = {}
    for case in cases:
        ids = tokenizer(case.prompt)["input_ids"] if isinstance(case.prompt, str) else list(case.prompt)
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            answer = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=case.max_tokens,
                pad_token_id=model.generation_config.eos_token_id,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = [logits[0].topk(2).values for logits in answer.logits]
        margins = [round(float(two[0] - two[1]), 6) for two in best]
        output = answer.sequences[0, len(ids) :].tolist()
        text = tokenizer.decode(output, skip_special_tokens=True)
        found[case.name] = Expected(ids, output, text, margins)
    return found


def main() -> None:
    model_dir, *names = sys.argv[1:]
    expected = compute(Path(model_dir), [BY_NAME[name] for name in names])
    print(json.dumps({name: asdict(one) for name, one in expected.items()}))


if __name__ == "__main__":
    main()
