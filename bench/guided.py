"""What guided text costs: compiling a grammar, following it, whole steps, and the first token.

    python -m bench.guided [--threads 1] [--rounds 5]

First no model runs: the tokens are those of an answer written beforehand, or drawn at random among those that are
allowed. Then SmolLM2-135M decodes, guided and plain requests in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.engine_systems import BatonEngine
from common.config import DEFAULT_MODEL, default_cache_dir
from common.guided import Guided
from common.model_files import open_model
from common.sampling import SamplingParams
from engine import messages as m
from engine.loading.embedded_model import ensure_model
from engine.sampling.grammars import GrammarCompiler
from engine.sampling.guide import Guide, make_masks

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    torch.set_num_threads(args.threads)
    compiler = GrammarCompiler(path / "tokenizer.json", VOCAB_SIZE, open_model(path).eos_token_ids)
    start, cpu = time.perf_counter(), time.process_time()
    compiler.load()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"tokenizer, at a worker's start: {1000 * wall:.0f} ms, {1000 * cpu:.0f} ms of CPU")
    guides = {}
    for name, schema in SCHEMAS.items():
        start = time.perf_counter()
        guides[name] = compiler(Guided(json_schema=json.dumps(schema)))
        print(f"compile {name:18} {1000 * (time.perf_counter() - start):7.1f} ms")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    written = [(guides[name], tokenizer.encode(text).ids) for name, text in ANSWERS]
    measure("an ordinary answer", written, None)
    measure("random tokens", written, random.Random(0))
    engine = BatonEngine(path, "bfloat16", args.threads, num_blocks=1024)
    compare_steps(engine, tokenizer, args.rounds)
    first_tokens(engine, tokenizer)


def compare_steps(engine: BatonEngine, tokenizer: Tokenizer, rounds: int) -> None:
    """Decode steps of `BATCH` requests, plain ones and guided ones in turn."""
    prompts = [
        tokenizer.encode(f"A list of people of village number {n}, with name and age, as JSON:").ids
        for n in range(BATCH)
    ]
    people = {"type": "array", "items": SCHEMAS["record"], "minItems": 50}
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    guided = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, guided=Guided(json_schema=json.dumps(people)))
    kinds = {
        "plain": plain,
        "guided": guided,
        "plain, drawn": replace(plain, temperature=1.0, top_p=0.95),
        "guided, drawn": replace(guided, temperature=1.0, top_p=0.95),
    }
    for params in kinds.values():  # the first use of a grammar is not counted
        decode(engine, prompts, params)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, params in kinds.items():
            seconds[kind].append(decode(engine, prompts, params))
    for kind, both in seconds.items():
        wall, cpu = (1000 * min(one) for one in zip(*both, strict=True))
        print(f"step of {BATCH} requests, {kind:13}: {wall:6.2f} ms, {cpu:6.2f} ms of CPU; the best of {rounds} rounds")


def decode(engine: BatonEngine, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Seconds of a step after the first tokens: on the clock, and of all threads on the CPU; medians."""
    for number, prompt in enumerate(prompts):
        own = replace(params, seed=number)
        engine.core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=own))
    steps = []
    while engine.core.has_work:
        wall, cpu = time.perf_counter(), time.process_time()
        if not engine.core.step():
            time.sleep(0.001)
            continue
        num_tokens = sum(isinstance(event, m.TokensGenerated) for event in engine.core.take_events())
        if num_tokens == len(prompts):
            steps.append((time.perf_counter() - wall, time.process_time() - cpu))
    if len(steps) != params.max_tokens:
        raise RuntimeError(f"{len(steps)} steps had a token for each request, not {params.max_tokens}")
    return statistics.median(one for one, _ in steps[1:]), statistics.median(one for _, one in steps[1:])


def first_tokens(engine: BatonEngine, tokenizer: Tokenizer) -> None:
    """What it takes until one request has its first token: plain, with a grammar never seen, and seen before."""
    prompt = tokenizer.encode("A list of people, with name and age, as JSON:").ids
    for what in ("plain", "with a cold grammar", "with a warm grammar"):
        times = []
        for number, schema in enumerate(SCHEMAS.values()):
            cold = {**schema, "title": f"number {number}"}  # another text than what was compiled
            guided = None if what == "plain" else Guided(json_schema=json.dumps(cold))
            params = SamplingParams(temperature=0.0, max_tokens=1, guided=guided)
            start = time.process_time()
            engine.core.handle(m.AddRequest(request_id="first", prompt_token_ids=prompt, sampling_params=params))
            while not any(isinstance(event, m.TokensGenerated) for event in engine.core.take_events()):
                if not engine.core.step():
                    time.sleep(0.0005)
            times.append(1000 * (time.process_time() - start))
        print(f"first token {what:20}: median {statistics.median(times):5.1f} ms of CPU, most {max(times):5.1f} ms")


def measure(what: str, written: Sequence[tuple[Guide, list[int]]], rng: random.Random | None) -> None:
    """What grammars take of a step of `BATCH` requests, each begun anew when it is done: each step makes the masks
    of all."""
    batch = [written[row % len(written)][0].fork() for row in range(BATCH)]
    answers: list[list[int]] = [[] for _ in batch]
    times: list[float] = []
    for _ in range(NUM_STEPS):
        start = time.process_time()  # of all threads: other work on the machine disturbs little
        for guide, answer in zip(batch, answers, strict=True):
            guide.follow(answer, 0)
        took = time.process_time() - start
        if rng is None:
            tokens = [written[row % len(written)][1][len(answer)] for row, answer in enumerate(answers)]
        else:
            masks = [
                np.unpackbits(np.frombuffer(one, np.uint8), bitorder="little")
                for one in make_masks([each.fork() for each in batch])
            ]
            tokens = [rng.choice(np.flatnonzero(mask).tolist()) for mask in masks]
        start = time.process_time()
        make_masks(batch)
        times.append(took + time.process_time() - start)
        for row, (answer, token_id) in enumerate(zip(answers, tokens, strict=True)):
            answer.append(token_id)
            first, whole = written[row % len(written)]
            if token_id in (0, 2) or (rng is None and len(answer) == len(whole)):
                batch[row], answer[:] = first.fork(), []
    print(
        f"masks of a step of {BATCH} requests, {what}: "
        f"median {1000 * statistics.median(times):.2f} ms of CPU, most {1000 * max(times):.2f} ms"
    )


if __name__ == "__main__":
    main()
