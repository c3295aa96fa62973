"""Requests that have come and are not in the scheduler's queue yet: they wait for their grammar, then for what the
store says about their prompts."""

from __future__ import annotations

from collections.abc import Callable

from common.block_hash import extra_keys
from common.errors import InvalidArgumentError
from common.sampling import SamplingParams
from engine import messages as m
from engine.remote_kv import PendingLookups
from engine.request import Request
from engine.sampling.grammars import PendingGrammars


class Arrivals:
    def __init__(
        self,
        lookups: PendingLookups,
        grammars: PendingGrammars | None,
        *,
        max_model_len: int,
        hidden_size: int,
        clock: Callable[[], float],
        emit: Callable[[m.Event], None],
    ) -> None:
        """If `grammars` is None, guided requests fail. `emit` takes the event of a request that fails."""
        self._lookups = lookups
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._hidden_size = hidden_size
        self._clock = clock
        self._emit = emit

    def __len__(self) -> int:
        return len(self._lookups) + (len(self._grammars) if self._grammars is not None else 0)

    @property
    def has_pending(self) -> bool:
        """Whether `take_ready` has something to look at."""
        return bool(self._lookups.waiting) or (self._grammars is not None and self._grammars.has_pending)

    @property
    def num_prompt_tokens(self) -> int:
        without_grammar = self._grammars.num_prompt_tokens if self._grammars is not None else 0
        return self._lookups.num_prompt_tokens + without_grammar

    def add(self, command: m.AddRequest) -> None:
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        if not command.prompt_token_ids:
            self._refuse(command.request_id, "is empty", "prompt_token_ids")
            return
        if num_tokens >= self._max_model_len:
            reason = f"{num_tokens} tokens leave no room in a context of {self._max_model_len}"
            self._refuse(command.request_id, reason, "prompt_token_ids")
            return
        now = self._clock()
        request = Request(
            request_id=command.request_id,
            token_ids=[*command.prompt_token_ids, *command.output_token_ids],
            num_prompt_tokens=len(command.prompt_token_ids),
            sampling_params=command.sampling_params,
            arrival_time=now,
            mode=command.mode,
            extra_keys=extra_keys(cache_salt=command.cache_salt),
            retain=command.retain,
            tenant=command.tenant,
            priority=command.priority,
            targets=command.targets,
            age_s=0.0 if command.asked_time is None else max(now - command.asked_time, 0.0),
            is_follow_up=command.is_follow_up,
            first_block=command.first_block,
            num_lendable_blocks=command.num_lendable_blocks,
            is_part=command.is_part,
            min_remote_tokens=command.min_remote_tokens,
            split_at=command.split_at,
        )
        is_scored = command.mode is not m.RequestMode.LOCAL or len(command.output_token_ids) > 0
        if command.sampling_params.prompt_logprobs is not None and not is_scored:
            request.num_unscored_tokens = request.num_prompt_tokens - 1
            request.needs_every_token = request.num_unscored_tokens > 0
        guided = command.sampling_params.guided
        if guided is None:
            self._lookups.start(request)
        elif self._grammars is None:
            self._emit(m.RequestFailed(command.request_id, "INTERNAL", "this engine has no grammars"))
        else:
            self._grammars.start(request, guided)

    def embed(self, command: m.Embed) -> None:
        if command.dimensions > self._hidden_size:
            reason = f"must be at most {self._hidden_size}, the model's, not {command.dimensions}"
            self._refuse(command.request_id, reason, "dimensions")
            return
        request = Request(
            request_id=command.request_id,
            token_ids=list(command.prompt_token_ids),
            num_prompt_tokens=len(command.prompt_token_ids),
            sampling_params=SamplingParams(),
            arrival_time=self._clock(),
            extra_keys=extra_keys(cache_salt=command.cache_salt),
            embed=command,
            needs_every_token=command.pooling is m.Pooling.MEAN,
        )
        self._lookups.start(request)

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._lookups.drop(request_id)
        if self._grammars is not None:
            self._grammars.drop(request_id)

    def take_ready(self) -> list[Request]:
        """Requests whose wait has ended since the last call: their grammar is compiled, and the store has answered."""
        for answered in self._grammars.take_answered() if self._grammars is not None else ():
            if not answered.failure:
                self._lookups.start(answered.request)
                continue
            field = "sampling_params.guided" if answered.grpc_code == InvalidArgumentError.grpc_code else ""
            event = m.RequestFailed(answered.request.request_id, answered.grpc_code, answered.failure, field)
            self._emit(event)
        return self._lookups.take_answered() if self._lookups.waiting else []

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _refuse(self, request_id: str, reason: str, field: str) -> None:
        self._emit(m.RequestFailed(request_id, InvalidArgumentError.grpc_code, reason, field))
