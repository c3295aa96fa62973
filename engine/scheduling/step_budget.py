"""How much of a request one step may compute: the one place that answers, whatever the answer is measured in. Pure."""

from __future__ import annotations

import math

from msgspec.structs import replace

from common.batch_time import BatchTime, StepShape

LEAST_CHUNK = 16  # tokens of a prompt that are worth a row, unless it lacks fewer or fewer tokens are left


class StepBudget:
    """What a step may still take, in tokens. It is never exceeded."""

    def __init__(self, num_tokens: int, chunk_size: int) -> None:
        """`chunk_size`: most tokens of one prompt."""
        self._num_left = num_tokens
        self._chunk_size = chunk_size

    @property
    def is_spent(self) -> bool:
        return self._num_left <= 0

    def chunk(self, num_missing: int, past: int = 0) -> int:  # noqa: ARG002
        """How many of a request's missing tokens, `past` computed ones before them, this step may take; 0 if the
        budget is spent."""
        return min(num_missing, self._chunk_size, self._num_left)

    def fitting(self, num_drafted: int) -> int:
        """How many of so many drafted tokens of one request this step may check."""
        return min(num_drafted, self._num_left)

    def take(self, num_tokens: int, past: int = 0) -> None:  # noqa: ARG002
        """Raises `ValueError` if that is more than is left."""
        if num_tokens > self._num_left:
            raise ValueError(f"{num_tokens} tokens for a step that has {self._num_left} left")
        self._num_left -= num_tokens

    def take_drafted(self, num_tokens: int) -> None:
        """Drafted tokens are rows of one token each."""
        self.take(num_tokens)


class TimeBudget(StepBudget):
    """What a step may still take, in tokens and in predicted time: nine in ten such steps end within `within`."""

    def __init__(
        self,
        num_tokens: int,
        chunk_size: int,
        time: BatchTime,
        decodes: StepShape,
        within: float,
        num_of_prompts: int | None = None,
    ) -> None:
        """`decodes`: the sums of the rows of one token that the step takes, whatever time that is. `within`: seconds;
        chunks of prompts and drafts are cut to it. `num_of_prompts`: most tokens of all prompts together."""
        super().__init__(num_tokens, chunk_size)
        self._num_left_of_prompts = num_tokens if num_of_prompts is None else num_of_prompts
        self.within = within
        self.shape = decodes
        self._time = time

    @property
    def is_spent(self) -> bool:
        return super().is_spent or not self.chunk(LEAST_CHUNK)

    @property
    def seconds(self) -> float:
        """That nine in ten steps of what was taken stay below."""
        return self._time.predict(self.shape).p90 if self.shape.num_tokens else 0.0

    def chunk(self, num_missing: int, past: int = 0) -> int:
        most = super().chunk(num_missing)
        if num_missing <= 1:
            return most
        most = min(most, self._num_left_of_prompts)
        if most < 1 or math.isinf(self.within):
            return most
        num_new = self._time.tokens_within(self.within, self.shape, past, most)
        return num_new if num_new >= min(LEAST_CHUNK, most) else 0

    def fitting(self, num_drafted: int) -> int:
        num = super().fitting(num_drafted)
        while num > 0 and not math.isinf(self.within):
            if self._time.predict(self._with_rows(num)).p90 <= self.within:
                break
            num //= 2
        return num

    def take(self, num_tokens: int, past: int = 0) -> None:
        super().take(num_tokens)
        if num_tokens > 1:
            self._num_left_of_prompts -= num_tokens
            shape = self.shape
            self.shape = replace(
                shape,
                num_chunks=shape.num_chunks + 1,
                chunk_tokens=shape.chunk_tokens + num_tokens,
                chunk_past=shape.chunk_past + past,
                chunk_pairs=shape.chunk_pairs + num_tokens * past + num_tokens * (num_tokens + 1) // 2,
                chunk_squares=shape.chunk_squares + num_tokens * num_tokens,
            )

    def take_drafted(self, num_tokens: int) -> None:
        super().take(num_tokens)
        self.shape = self._with_rows(num_tokens)

    def _with_rows(self, num: int) -> StepShape:
        shape = self.shape
        context = shape.decode_context // max(shape.num_decodes, 1)
        return replace(
            shape,
            num_decodes=shape.num_decodes + num,
            decode_context=shape.decode_context + num * context,
            num_head_rows=shape.num_head_rows + num,
        )
