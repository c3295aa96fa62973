"""The prompts that every way through Baton has to answer as transformers does: 1 to 2,000 tokens, of many kinds."""

# ruff: noqa: RUF001 - other alphabets are the point

from __future__ import annotations

import random
from dataclasses import dataclass

VOCAB_SIZE = 49152  # of the embedded model
SHORT, LONG, VERY_LONG = 16, 64, 208  # tokens of an answer


@dataclass(slots=True, frozen=True)
class Case:
    name: str
    prompt: str | tuple[int, ...]  # text, or token ids
    max_tokens: int = SHORT


def _random_ids(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(17, VOCAB_SIZE) for _ in range(count))  # special tokens come first


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _ledger(num_lines: int, seed: int) -> str:
    """A text without end that never repeats itself: about 20 tokens a line."""
    rng = random.Random(seed)
    names = ("Amara", "Bence", "Chiyo", "Diego", "Elif", "Farid", "Greta", "Hana")
    goods = ("copper wire", "roasted coffee", "linen", "lamp oil", "barley", "window glass")
    lines = (
        f"{rng.choice(names)} sold {rng.randrange(2, 99)} crates of {rng.choice(goods)} to {rng.choice(names)}."
        for _ in range(num_lines)
    )
    return "\n".join(lines)


_CODE = '''def merge(left, right):
    """Merges two sorted lists."""
    result = []
    while left and right:
        result.append((left if left[0] <= right[0] else right).pop(0))
    return result + left + right


def merge_sort(items):
'''

CASES = (
    Case("one-token", (504,)),
    Case("one-random-token", (31_337,)),
    Case("two-tokens", (504, 2988), LONG),
    Case("capital", "The capital of France is"),
    Case("story", "Once upon a time, in a village by the sea, there lived", VERY_LONG),
    Case("chat-capital", _chat("What is the capital of France?")),
    Case("chat-poem", _chat("Write a short poem about the moon and the tide."), VERY_LONG),
    Case("chat-steps", _chat("Explain how to brew green tea, step by step."), LONG),
    Case("chat-yes", _chat("Answer with yes or no: is water wet?"), LONG),
    Case("arithmetic", "12 + 30 = 42\n7 + 8 = 15\n9 + 9 ="),
    Case("list", "1. apples\n2. pears\n3. plums\n4.", LONG),
    Case("code-python", _CODE, LONG),
    Case("code-c", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    Case("code-html", "<!doctype html>\n<html>\n  <head>\n    <title>", LONG),
    Case("json", '{"name": "Ada", "born": 1815, "fields": ["mathematics", "'),
    Case("german", "Der schnelle braune Fuchs springt über den faulen Hund, weil"),
    Case("french", "Il était une fois une petite fille qui aimait beaucoup"),
    Case("spanish", "La ciudad de Buenos Aires es conocida por su música y"),
    Case("russian", "Москва является столицей России, а Санкт-Петербург"),
    Case("greek", "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και"),
    Case("arabic", "القاهرة هي عاصمة مصر وأكبر مدنها"),
    Case("hebrew", "ירושלים היא עיר עתיקה מאוד"),
    Case("hindi", "भारत की राजधानी नई दिल्ली है और"),
    Case("thai", "กรุงเทพมหานครเป็นเมืองหลวงของ"),
    Case("chinese", "北京是中国的首都，上海是", LONG),
    Case("japanese", "東京は日本の首都であり、人口は"),
    Case("korean", "서울은 대한민국의 수도이며"),
    Case("emoji", "🎉🎂🎈 Happy birthday! 🥳🎁 Party time: 🍕🍰🎶", LONG),
    Case("whitespace", "\n\n\t  \n   x\n\n\n"),
    Case("random-17", _random_ids(17, 1), 12),  # its 15th token is nearly a tie
    Case("random-160", _random_ids(160, 2)),
    Case("ledger-250", _ledger(18, 3), LONG),
    Case("ledger-600", _ledger(43, 4)),
    Case("ledger-1200", _ledger(86, 5)),
    Case("random-2000", _random_ids(2000, 6)),
)

BY_NAME = {case.name: case for case in CASES}
