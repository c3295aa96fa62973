"""Ends an answer before the first stop string, and shows nothing that might turn out to be a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StopResult:
    text: str  # may be shown now
    matched: str | None = None  # the stop string that ended the answer; `text` ends before it, or with it


class StopStrings:
    """Looks for `stop` in text that comes in pieces of any size; how it is cut into pieces makes no difference.

    The first stop string to be complete wins; of several that end at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: whether the text ends with the stop string, and not before it."""
        self._stop = tuple(stop)
        self._is_shown = is_shown
        self._held = ""

    def add(self, text: str, *, armed: bool = True) -> StopResult:
        """`armed` False: text that may not end the answer (below `min_tokens`); it is shown as it is."""
        if not self._stop:
            return StopResult(text)
        if not armed:
            return StopResult(self.flush() + text)
        held = self._held + text
        matches = [(held.find(stop) + len(stop), held.find(stop), stop) for stop in self._stop if stop in held]
        if matches:
            end, start, matched = min(matches)
            self._held = ""
            return StopResult(held[: end if self._is_shown else start], matched)
        keep = self._possible_start(held)
        self._held = held[keep:]
        return StopResult(held[:keep])

    def flush(self) -> str:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """The earliest index from which the rest of `text` is the beginning of a stop string."""
        longest = max(map(len, self._stop)) - 1
        for index in range(max(0, len(text) - longest), len(text)):
            rest = text[index:]
            if any(stop.startswith(rest) for stop in self._stop):
                return index
        return len(text)
