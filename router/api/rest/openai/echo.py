"""An answer that begins with its prompt, or with a message of its chat: what `echo` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from router.running.request import Output
from text.text_offsets import CONTINUATION
from text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Echo:
    """`texts`: of the prompts. Not `generates`: the prompt is the whole answer, and the token that workers add to it is
    dropped. Not `is_prompt`: each text is only a part of its prompt, so the prompt's tokens do not come with it."""

    texts: Sequence[str]
    generates: bool = True
    is_prompt: bool = True


class EchoedPrompt:
    """One choice's. Puts the prompt before what comes of the answer."""

    def __init__(self, text: str, prompt_token_ids: Sequence[int], *, generates: bool, is_prompt: bool = True) -> None:
        self.num_chars = len(text)
        self._text = text
        self._first_token_id = prompt_token_ids[0]
        self._generates = generates
        self._is_prompt = is_prompt
        self._is_begun = False
        self._data = text.encode()
        self._num_bytes = 0  # of the text, that belong to tokens so far
        self._offset = 0  # characters that begin in these bytes

    def before(self, output: Output) -> Output:
        """`output`, with the prompt's text and first token if it is the answer's first. Nothing comes before the first
        token, so it has no logprob."""
        if not self._generates:
            output = _without_tokens(output)
        if not self._is_prompt:
            output = replace(output, prompt_logprobs=[])
        if self._is_begun:
            return output
        self._is_begun = True
        if not self._is_prompt:
            return replace(output, text=self._text + output.text)
        first = SampledToken(self._first_token_id)
        return replace(output, text=self._text + output.text, prompt_logprobs=[first, *output.prompt_logprobs])

    def offsets(self, tokens: Sequence[SampledToken], tokenizer: Tokenizer) -> list[int]:
        """Where further tokens of the prompt begin in its text, in characters, as `TextOffsets` says of answers. Tokens
        that a tokenizer puts before a text, and the space that some put there, are not in it."""
        found = []
        for token in tokens:
            data = tokenizer.token_bytes(token.token_id)
            if not self._data.startswith(data, self._num_bytes) and not self._num_bytes:
                data = data.removeprefix(b" ")
            found.append(self._offset - (bool(data) and data[0] in CONTINUATION and self._offset > 0))
            if self._data.startswith(data, self._num_bytes):
                self._num_bytes += len(data)
                self._offset += sum(byte not in CONTINUATION for byte in data)
        return found


def _without_tokens(output: Output) -> Output:
    output = replace(output, text="", tokens=[])
    if output.finish_reason is None:
        return output
    usage = types_pb2.Usage()
    if output.usage is not None:
        usage.CopyFrom(output.usage)
    usage.completion_tokens = 0
    return replace(output, finish_reason=FinishReason.LENGTH, stop_reason=None, usage=usage)
