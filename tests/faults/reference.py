"""A model slow enough that its chunks can be stopped half-way, a prompt of several chunks, and transformers' answer.

`python -m tests.faults.reference FOLDER` writes the model and prints the `Reference` as JSON.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec

from tests.faults.scene import CHUNK_SIZE, NUM_CHUNKS

NUM_TOKENS = 48  # of the answer
MAX_LEN = 10_240  # tokens
TIE = 1e-3  # logits of one token differ by less than a tenth of it between batches, here


class Reference(msgspec.Struct, frozen=True):
    model_dir: str
    prompt: list[int]  # NUM_CHUNKS * CHUNK_SIZE tokens
    token_ids: tuple[int, ...]  # NUM_TOKENS, greedy


def make(folder: Path) -> Reference:
    import torch
    from transformers import LlamaForCausalLM

    from tests.chaos.tiny_model import random_prompt, reference_answer, write_tiny_model

    write_tiny_model(folder, hidden_size=192, num_layers=16, initializer_range=0.12, max_len=MAX_LEN)
    torch.set_num_threads(1)  # two that share busy cores spend their time waiting for each other
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for seed in range(20):
        prompt = random_prompt(random.Random(seed), NUM_CHUNKS * CHUNK_SIZE)
        answer = reference_answer(model, prompt, NUM_TOKENS, temperature=0.0, seed=0, tie=TIE)
        if len(answer) == NUM_TOKENS:
            return Reference(str(folder), prompt, tuple(answer))
    raise AssertionError("every answer has a tie")


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(make(Path(sys.argv[1]))).decode())
