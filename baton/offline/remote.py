"""A stack that runs somewhere, asked over gRPC with many requests in flight."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence

from baton.client import Answer as Stream
from baton.client import Client
from baton.offline.backend import Answer, Ask, Beams, Chat, Vector
from common.beam_search import BeamSearchParams
from common.errors import BatonError, ConfigError, InvalidArgumentError
from common.sampling import SamplingOptions

MAX_IN_FLIGHT = 64
EMBED_INPUTS = 64  # of one call


class RemoteStack:
    def __init__(self, client: Client) -> None:
        self._client = client

    def close(self) -> None:
        self._client.close()

    def token_text(self, token_id: int) -> None:  # noqa: ARG002
        return None

    def answers(self, asks: Sequence[Ask]) -> Generator[Answer, None, None]:
        left = ((index, number) for index, ask in enumerate(asks) for number in range(ask.params.num_candidates))
        streams: deque[tuple[int, int, list[int] | None, Stream]] = deque()
        try:
            while True:
                for index, number in itertools.islice(left, MAX_IN_FLIGHT - len(streams)):
                    streams.append((index, number, *self._begin(asks[index], number)))
                if not streams:
                    return
                index, number, token_ids, stream = streams[0]
                result = stream.result()
                if result.finish_reason is None:
                    raise BatonError(f"{asks[index].name}: the answer was cut off")
                streams.popleft()
                yield Answer(index, number, token_ids, result)
        finally:
            for _, _, _, stream in streams:
                stream.cancel()

    def _begin(self, ask: Ask, number: int) -> tuple[list[int] | None, Stream]:
        options: SamplingOptions = {**ask.params.options}
        if "seed" in options:
            options["seed"] = (options["seed"] + number + 2**63) % 2**64 - 2**63  # as a router numbers them
        if isinstance(ask.prompt, Chat):
            chat = ask.prompt
            return None, self._client.chat(
                chat.messages,
                tools=chat.tools,
                tool_choice=chat.tool_choice,
                chat_template_kwargs=chat.template_options,
                priority=ask.priority,
                **options,
            )
        token_ids = self._token_ids(ask.prompt, ask.name)
        return token_ids, self._client.generate(token_ids, priority=ask.priority, **options)

    def vectors(
        self, prompts: Sequence[str | list[int]], *, pooling: str, dimensions: int, normalize: bool
    ) -> Generator[Vector, None, None]:
        for start in range(0, len(prompts), EMBED_INPUTS):
            stop = min(start + EMBED_INPUTS, len(prompts))
            inputs = [self._token_ids(prompts[index], f"prompts[{index}]") for index in range(start, stop)]
            values = self._client.embed(inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)
            for index, (token_ids, vector) in enumerate(zip(inputs, values, strict=True), start):
                yield Vector(index, token_ids, vector)

    def beams(self, prompts: Sequence[str | list[int]], params: BeamSearchParams) -> Generator[Beams, None, None]:  # noqa: ARG002
        raise ConfigError("target", "has no beam search: it needs the engine in this process")

    def text(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids)

    def _token_ids(self, prompt: str | list[int], name: str) -> list[int]:
        if not prompt:
            raise InvalidArgumentError(name, "must not be empty")
        return self._client.tokenize(prompt) if isinstance(prompt, str) else prompt
