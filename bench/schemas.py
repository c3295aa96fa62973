"""How many JSON schemas of a folder are usable: the share of MaskBench.

    python -m bench.schemas FOLDER [--sample 2500] [--seed 7] [--refused]

FOLDER has MaskBench's files (github.com/guidance-ai/jsonschemabench, maskbench/data): a schema each, with instances
that are valid and instances that are not. A schema is usable if its grammar compiles, takes each valid instance and
refuses each other one. It is wrong if it compiles and does not. Instances are written as json.dumps does, with their
keys in some order that the grammar takes, if there is one: answers have the order of the schema.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from common.config import DEFAULT_MODEL, default_cache_dir
from common.guided import Guided, grammar_of
from engine.loading.embedded_model import ensure_model

Names = list[list[str]]  # of the properties of each object schema
MAX_STEPS = 5000  # of looking for the order of an instance's keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=2500, help="how many schemas; 0: all")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--refused", action="store_true", help="print why each refused schema is")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.json"))
    random.Random(args.seed).shuffle(files)
    files = files[: args.sample or None]
    if not files:
        raise SystemExit(f"{args.folder} has no .json files")
    tokenizer = LLTokenizer(str(ensure_model(DEFAULT_MODEL, default_cache_dir(), print) / "tokenizer.json"))
    outcomes: Counter[str] = Counter()
    milliseconds = []
    for file in files:
        case = json.loads(file.read_text())
        start = time.perf_counter()
        try:
            matcher = compiled(tokenizer, case["schema"])
        except ValueError as error:
            outcomes["refused"] += 1
            if args.refused:
                print(f"{file.name}: {str(error)[:200]}")
            continue
        milliseconds.append(1000 * (time.perf_counter() - start))
        if wrong := wrong_instance(tokenizer, matcher, case):
            outcomes["wrong"] += 1
            print(f"{file.name}: {wrong}")
        else:
            outcomes["usable"] += 1
    num = len(files)
    print(f"{num} schemas: " + ", ".join(f"{count} {name} ({count / num:.1%})" for name, count in outcomes.items()))
    if len(milliseconds) > 1:
        twentieths = statistics.quantiles(milliseconds, n=20)
        print(f"compiled in {twentieths[9]:.1f} ms (median), {twentieths[18]:.1f} ms (p95), {max(milliseconds):.0f} ms")


def compiled(tokenizer: LLTokenizer, schema: object) -> LLMatcher:
    """Raises `ValueError` if the schema is refused."""
    matcher = LLMatcher(tokenizer, grammar_of(Guided(json_schema=json.dumps(schema))), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(" ".join(matcher.get_error().partition("<state>")[0].split()))
    return matcher


def wrong_instance(tokenizer: LLTokenizer, matcher: LLMatcher, case: dict[str, Any]) -> str:
    """What the grammar gets wrong; empty if nothing."""
    names = list(_property_names(case["schema"]))
    for test in case["tests"]:
        text = json.dumps(test["data"], ensure_ascii=False)
        if takes(tokenizer, matcher, test["data"], names) != test["valid"]:
            return f"{'refuses' if test['valid'] else 'takes'} {text[:200]}"
    return ""


def takes(tokenizer: LLTokenizer, matcher: LLMatcher, value: object, names: Names) -> bool:
    """Whether the grammar takes the value with its keys in some order. `names`: orders to try first."""
    whole = _consumed(tokenizer, matcher, json.dumps(value, ensure_ascii=False))
    if whole is not None and whole.is_accepting():
        return True
    steps = iter(range(MAX_STEPS))
    return any(after.is_accepting() for after in _after(tokenizer, matcher, _in_order(value, names), "", steps))


def _after(
    tokenizer: LLTokenizer, matcher: LLMatcher, value: Any, before: str, steps: Iterator[int]
) -> Iterator[LLMatcher]:
    """The grammar's states after `before` and `value`."""
    if isinstance(value, list) and value:
        states: Iterable[LLMatcher] = [matcher]
        for index, one in enumerate(value):
            states = _each_after(tokenizer, states, one, ", " if index else f"{before}[", steps)
        yield from _each_text(tokenizer, states, "]", steps)
    elif isinstance(value, dict) and value:
        yield from _each_text(tokenizer, _keys(tokenizer, matcher, value, before + "{", steps), "}", steps)
    else:
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        for written in [value, int(value)] if whole else [value]:
            yield from _each_text(tokenizer, [matcher], before + json.dumps(written, ensure_ascii=False), steps)


def _keys(
    tokenizer: LLTokenizer, matcher: LLMatcher, value: dict[str, Any], before: str, steps: Iterator[int]
) -> Iterator[LLMatcher]:
    if not value:
        yield matcher
    for key, one in value.items():
        rest = {name: other for name, other in value.items() if name != key}
        for state in _each_text(tokenizer, [matcher], f"{before}{json.dumps(key, ensure_ascii=False)}: ", steps):
            for after in _after(tokenizer, state, one, "", steps):
                yield from _keys(tokenizer, after, rest, ", ", steps)


def _each_after(
    tokenizer: LLTokenizer, states: Iterable[LLMatcher], value: object, before: str, steps: Iterator[int]
) -> Iterator[LLMatcher]:
    for state in states:
        yield from _after(tokenizer, state, value, before, steps)


def _each_text(
    tokenizer: LLTokenizer, states: Iterable[LLMatcher], text: str, steps: Iterator[int]
) -> Iterator[LLMatcher]:
    for state in states:
        if next(steps, None) is not None and (after := _consumed(tokenizer, state, text)) is not None:
            yield after


def _consumed(tokenizer: LLTokenizer, matcher: LLMatcher, text: str) -> LLMatcher | None:
    matcher = matcher.deep_copy()
    tokens = tokenizer.tokenize_str(text)
    return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None


def _property_names(schema: object) -> Iterator[list[str]]:
    if isinstance(schema, dict):
        if isinstance(properties := schema.get("properties"), dict):
            yield list(properties)
        for value in schema.values():
            yield from _property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _property_names(value)


def _in_order(value: Any, names: Names) -> Any:
    """`value` with keys in the order of that object schema which names most of them."""
    if isinstance(value, list):
        return [_in_order(one, names) for one in value]
    if not isinstance(value, dict):
        return value
    best = max(names, key=lambda some: len(value.keys() & set(some)), default=[])
    keys = [*(name for name in best if name in value), *(key for key in value if key not in best)]
    return {key: _in_order(value[key], names) for key in keys}


if __name__ == "__main__":
    main()
