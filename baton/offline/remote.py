"""A stack that runs somewhere, asked over gRPC with many requests in flight."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from typing import cast

from baton.client.sync_client import Answer as Stream
from baton.client.sync_client import Client
from baton.offline.backend import Answer, Ask, Beams, Chat, Vector
from common.beam_search import Beam, BeamSearchParams
from common.choices import MAX_BEAM_WIDTH, AnswerOptions
from common.errors import BatonError, InvalidArgumentError

MAX_IN_FLIGHT = 64
EMBED_INPUTS = 64  # of one call
ANSWERS_OF_A_CALL = 8  # which a router of any version takes


class RemoteStack:
    def __init__(self, client: Client) -> None:
        self._client = client

    def close(self) -> None:
        self._client.close()

    def token_text(self, token_id: int) -> None:  # noqa: ARG002
        return None

    def answers(self, asks: Sequence[Ask]) -> Generator[Answer, None, None]:
        """Up to ANSWERS_OF_A_CALL answers to a prompt are one call: they come from one decode worker, after one
        prefill."""
        left = (
            (index, first, min(ANSWERS_OF_A_CALL, ask.params.num_candidates - first))
            for index, ask in enumerate(asks)
            for first in range(0, ask.params.num_candidates, ANSWERS_OF_A_CALL)
        )
        calls: deque[tuple[int, int, list[int] | None, Stream]] = deque()
        num_in_flight = 0
        try:
            while True:
                while num_in_flight < MAX_IN_FLIGHT and (following := next(left, None)) is not None:
                    index, first, num = following
                    calls.append((index, first, *self._begin(asks[index], first, num)))
                    num_in_flight += num
                if not calls:
                    return
                index, first, token_ids, stream = calls[0]
                results = stream.results()
                if any(result.finish_reason is None for result in results):
                    raise BatonError(f"{asks[index].name}: the answer was cut off")
                calls.popleft()
                num_in_flight -= len(results)
                for number, result in enumerate(results, first):
                    yield Answer(index, number, token_ids, result)
        finally:
            for _, _, _, stream in calls:
                stream.cancel()

    def _begin(self, ask: Ask, first: int, num: int) -> tuple[list[int] | None, Stream]:
        """Asks for the candidates from number `first` on."""
        options = cast("AnswerOptions", dict(ask.params.options))
        if num > 1:
            options["n"] = num
        if first:
            options.pop("prompt_logprobs", None)  # the first call has them
        if "seed" in options:
            options["seed"] = (options["seed"] + first + 2**63) % 2**64 - 2**63  # as a router numbers them
        if isinstance(ask.prompt, Chat):
            chat = ask.prompt
            return None, self._client.chat(
                chat.messages,
                tools=chat.tools,
                tool_choice=chat.tool_choice,
                allowed_tools=chat.allowed_tools,
                parallel_tool_calls=chat.parallel_tool_calls,
                chat_template_kwargs=chat.template_options,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                chat_template=chat.chat_template,
                priority=ask.priority,
                slo=ask.slo,
                slo_class=ask.slo_class,
                **options,
            )
        token_ids = self._token_ids(ask.prompt, ask.name)
        if (keep := ask.params.options.get("truncate_prompt_tokens") or 0) > 0:
            token_ids = token_ids[-keep:]  # as the router does, and as the output tells
        return token_ids, self._client.generate(
            token_ids, priority=ask.priority, slo=ask.slo, slo_class=ask.slo_class, **options
        )

    def vectors(
        self, prompts: Sequence[str | list[int]], *, pooling: str, dimensions: int, normalize: bool
    ) -> Generator[Vector, None, None]:
        for start in range(0, len(prompts), EMBED_INPUTS):
            stop = min(start + EMBED_INPUTS, len(prompts))
            inputs = [self._token_ids(prompts[index], f"prompts[{index}]") for index in range(start, stop)]
            values = self._client.embed(inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)
            for index, (token_ids, vector) in enumerate(zip(inputs, values, strict=True), start):
                yield Vector(index, token_ids, vector)

    def beams(self, prompts: Sequence[str | list[int]], params: BeamSearchParams) -> Generator[Beams, None, None]:
        if params.beam_width > MAX_BEAM_WIDTH:
            raise InvalidArgumentError(
                "beam_width", f"must be at most {MAX_BEAM_WIDTH} with target, not {params.beam_width}"
            )
        given = iter(enumerate(prompts))
        calls: deque[tuple[int, list[int], Stream]] = deque()
        try:
            while True:
                for index, prompt in itertools.islice(given, MAX_IN_FLIGHT // params.beam_width - len(calls)):
                    token_ids = self._token_ids(prompt, f"prompts[{index}]")
                    calls.append((index, token_ids, self._search(token_ids, params)))
                if not calls:
                    return
                index, token_ids, stream = calls[0]
                results = stream.results()
                if any(result.cumulative_logprob is None for result in results):
                    raise BatonError(f"prompts[{index}]: the search was cut off, or the router knows none")
                calls.popleft()
                beams = [Beam(one.token_ids, one.cumulative_logprob or 0.0, one.finish_reason) for one in results]
                yield Beams(index, token_ids, beams)
        finally:
            for _, _, stream in calls:
                stream.cancel()

    def _search(self, token_ids: list[int], params: BeamSearchParams) -> Stream:
        return self._client.generate(
            token_ids,
            n=params.beam_width,
            use_beam_search=True,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
        )

    def chat_token_ids(self, chat: Chat) -> list[int]:
        return self._client.tokenize(
            messages=chat.messages,
            tools=chat.tools,
            chat_template_kwargs=chat.template_options,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template=chat.chat_template,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids)

    def _token_ids(self, prompt: str | list[int], name: str) -> list[int]:
        if not prompt:
            raise InvalidArgumentError(name, "must not be empty")
        return self._client.tokenize(prompt) if isinstance(prompt, str) else prompt
