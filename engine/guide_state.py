"""What requests know of the grammar that guides their text. `engine.guide` has the rest, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GuideError(Exception):
    """The answer cannot go on in its grammar; the reason is one line."""

    def __init__(self, reason: str, *, is_too_much: bool = False) -> None:
        """`is_too_much`: for the grammar itself, whose limits following it has reached; so it will anywhere."""
        super().__init__(reason)
        self.is_too_much = is_too_much


class GuideState(Protocol):
    """Where one answer is in its grammar. It follows from the answer's tokens alone, so that a request that continues
    elsewhere replays them there."""

    def fork(self) -> GuideState:
        """Another one, that is where this one is now."""

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the output tokens that came since the last call. `token_ids`: prompt, then output.

        Raises `GuideError` if one of them is not in the grammar.
        """

    @property
    def failure(self) -> str:
        """Why no token may come; empty if one may. Known after its mask was made."""
