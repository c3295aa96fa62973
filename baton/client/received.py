"""What has come of the answers to one request. Shared by the client and its asyncio twin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.client.messages import Calls
from baton.client.report import Chunk, RequestReport, Result, Usage
from baton.client.requests import chunk_of
from protos.baton.v1 import inference_pb2
from protos.convert import finish_reason_of
from protos.messages import value_of


@dataclass(slots=True)
class _Choice:
    chunks: list[Chunk] = field(default_factory=list)
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)

    def result(self) -> Result:
        chunks, last = self.chunks, self.last
        return Result(
            request_id=last.request_id,
            model=last.model,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(token for chunk in chunks for token in chunk.logprobs),
            finish_reason=finish_reason_of(last.finish_reason),
            stop_reason=last.stop_reason,
            reasoning="".join(chunk.reasoning for chunk in chunks),
            prompt_logprobs=tuple(token for chunk in chunks for token in chunk.prompt_logprobs),
            tool_calls=Calls([delta for chunk in chunks for delta in chunk.tool_calls]).whole(),
            cumulative_logprob=last.cumulative_logprob if last.HasField("cumulative_logprob") else None,
            usage=value_of(last.usage, Usage),
            report=value_of(last.report, RequestReport),
        )


class Received:
    """What was received of `num_choices` answers. One that a router of an older version never began is empty in the
    end."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def add(self, message: inference_pb2.GenerateResponse) -> Chunk:
        chunk, choice = chunk_of(message), self._choices[message.index]
        choice.last = message
        choice.chunks.append(chunk)
        return chunk

    @property
    def is_whole(self) -> bool:
        return sum(bool(choice.last.finish_reason) for choice in self._choices.values()) >= self._num_choices

    @property
    def text(self) -> str:
        """The first answer's text so far."""
        return "".join(chunk.text for chunk in self._choices[0].chunks)

    def results(self) -> list[Result]:
        return [self._choices[index].result() for index in range(self._num_choices)]


def last_message(num_choices: int) -> Callable[[inference_pb2.GenerateResponse], bool]:
    """Returns a function to call with each message of one stream, in order: whether that message ends the last
    answer."""
    num_left = num_choices

    def is_last(message: inference_pb2.GenerateResponse) -> bool:
        nonlocal num_left
        num_left -= bool(message.finish_reason)
        return num_left <= 0

    return is_last
