"""Prompts of a given number of tokens, the same for the same seed.

Without a tokenizer they are made of short words that are one token each in the vocabularies of most models, with the
space before them. How many tokens they were in fact is what the endpoint says (`usage`), and reports use that.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError

_TEXT = """
about above after again air all also always am and any are around as ask at away back bad be because been before
began being below best better between big black blue body book both boy but by call came can car change city close
cold come could country cut dark day did do does done door down each early earth eat end enough even ever every
example eye face fact far farm fast feet few field find fire first fish five follow food for form four free from
full game gave get girl give go gold good great green ground group grow had half hand hard has have he head hear
heart help her here high him his hold home horse hot hour house how if in into is it its just keep kind king knew
know land large last late learn leave left letter life light like line list live long look love low made main make
man many map mark may me mean men might mile mind money moon more most move much music must my name near need never
new next night no north not now number of off oil old on once one only open or order other our out over own page
paper part pass people place plan plant play point power press problem pull put question quick rain ran read real
red rest right river road rock room round rule run said same saw say school sea second see seem self sense set seven
ship short should show side simple since six size sleep slow small so some song soon sound south space stand star
start state step still stop story street strong study such sun sure table take talk tell ten than that the their
them then there these they thing think this those though three time to told too took top town tree true try turn two
under unit until up us use very voice walk want war warm was watch water way we week well went were west what wheel
when where which while white who whole why wide will wind with wood word work world would write year yes yet you
young your
"""
WORDS = tuple(_TEXT.split())
MIN_WORDS = 50


class Texts(Protocol):
    """Every method gives the same text for the same arguments."""

    def text(self, num_tokens: int, seed: str) -> str:
        """Begins with a space, so it can follow another text."""

    def count(self, text: str) -> int:
        """Tokens of any text."""

    def salted(self, salt: str) -> Texts:
        """Other texts, of the same lengths: no prefix cache has them from an earlier run."""


class PlainWords:
    """Without a tokenizer."""

    def __init__(self, salt: str = "") -> None:
        self._salt = salt

    def text(self, num_tokens: int, seed: str) -> str:
        return _joined(random.Random(f"{self._salt}/{seed}").choices(WORDS, k=num_tokens))

    def salted(self, salt: str) -> Texts:
        return PlainWords(f"{self._salt}/{salt}")

    def count(self, text: str) -> int:
        """A guess: four characters a token, which is about right for English."""
        return max(round(len(text) / 4), 1)


class TokenizedWords:
    """With the model's tokenizer: texts are as long as they should be, unless words merge where two texts meet."""

    def __init__(self, path: str) -> None:
        """`path`: a folder with `tokenizer.json`, or that file. Raises `ConfigError`."""
        from tokenizers import Tokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more exact
            raise ConfigError("--tokenizer", f"{file} cannot be read: {error}") from error
        # One token with the space before them.
        self._words = tuple(word for word in WORDS if self.count(f" {word}") == 1)
        self._salt = ""
        if len(self._words) < MIN_WORDS:
            raise ConfigError("--tokenizer", f"{len(self._words)} common words are one token each, too few for prompts")

    def text(self, num_tokens: int, seed: str) -> str:
        return _joined(random.Random(f"{self._salt}/{seed}").choices(self._words, k=num_tokens))

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def salted(self, salt: str) -> Texts:
        other = copy.copy(self)
        other._salt = f"{self._salt}/{salt}"
        return other


def texts(tokenizer: str | None) -> Texts:
    return PlainWords() if tokenizer is None else TokenizedWords(tokenizer)


def _joined(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)
