"""What guided text costs: compiling a grammar, and the masks of a step. `python -m bench.guided`.

No model runs: the tokens are those of an answer written beforehand, or drawn at random among those that are allowed.
Compare a step's masks with what one step of the model takes (`python -m bench.engine`).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from common.config import DEFAULT_MODEL, default_cache_dir
from common.guided import Guided
from common.model_files import open_model
from engine.embedded_model import ensure_model
from engine.grammars import GrammarCompiler
from engine.guide import Guide, mask_logits

BATCH = 32
NUM_STEPS = 60
VOCAB_SIZE = 49152

TEXT = {"type": "string", "maxLength": 40}
SCHEMAS: dict[str, dict[str, object]] = {
    "integer": {"type": "integer"},
    "enum of 5": {"enum": ["a", "b", "c", "d", "e"]},
    "enum of 1000": {"enum": [f"value-{i}" for i in range(1000)]},
    "record": {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}, "required": ["name", "age"]},
    "array of records": {"type": "array", "items": {"type": "object", "properties": {"x": TEXT}}, "maxItems": 20},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}-[a-z]+$"},
    "formats": {"type": "array", "prefixItems": [{"format": f, "type": "string"} for f in ("date", "uuid", "email")]},
    "union": {"anyOf": [{"type": "object", "properties": {f"p{i}": TEXT}} for i in range(20)]},
    "50 properties": {"type": "object", "properties": {f"p{i}": TEXT for i in range(50)}},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"value": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            }
        },
    },
}

ANSWERS = (
    ("record", '{"name": "Johnathan Smith of York", "age": 42}'),
    ("array of records", '[{"x": "hello there my friend"}, {"x": "and another one"}, {"x": "and one more"}]'),
    ("recursive", '{"value": "a root", "children": [{"value": "a leaf", "children": []}, {"value": "an other"}]}'),
)


def main() -> None:
    path = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    compiler = GrammarCompiler(path / "tokenizer.json", VOCAB_SIZE, open_model(path).eos_token_ids)
    start = time.perf_counter()
    compiler(Guided(regex="a"))
    print(f"tokenizer, once in a worker's life: {1000 * (time.perf_counter() - start):.0f} ms")
    guides = {}
    for name, schema in SCHEMAS.items():
        start = time.perf_counter()
        guides[name] = compiler(Guided(json_schema=json.dumps(schema)))
        print(f"compile {name:18} {1000 * (time.perf_counter() - start):7.1f} ms")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    written = [(guides[name], tokenizer.encode(text).ids) for name, text in ANSWERS]
    measure("an ordinary answer", written, None)
    measure("random tokens, the worst there is", written, random.Random(0))


def measure(what: str, written: Sequence[tuple[Guide, list[int]]], rng: random.Random | None) -> None:
    """`BATCH` requests side by side, each begun anew when it is done."""
    batch = [written[row % len(written)][0].fork() for row in range(BATCH)]
    answers: list[list[int]] = [[] for _ in batch]
    times = []
    for _ in range(NUM_STEPS):
        logits = torch.zeros(BATCH, VOCAB_SIZE)
        start = time.perf_counter()
        for guide, answer in zip(batch, answers, strict=True):
            guide.follow(answer, 0)
        mask_logits(logits, list(enumerate(batch)))
        times.append(time.perf_counter() - start)
        for row, answer in enumerate(answers):
            first, tokens = written[row % len(written)]
            if rng is not None:
                tokens = [*answer, rng.choice(torch.isfinite(logits[row]).nonzero().flatten().tolist())]
            if len(answer) == len(tokens) or tokens[len(answer)] in (0, 2):
                batch[row], answer[:] = first.fork(), []
            else:
                answer.append(tokens[len(answer)])
    print(
        f"masks of a step of {BATCH} requests, {torch.get_num_threads()} threads, {what}: "
        f"median {1000 * statistics.median(times):.2f} ms, most {1000 * max(times):.2f} ms"
    )


if __name__ == "__main__":
    main()
