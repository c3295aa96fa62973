"""What an inference of the Open Inference Protocol asks for, and the tensors that answer it. Both of its forms, gRPC
and REST, are made of this. Tensors have the names of Triton's backend of vLLM, so that its clients work unchanged; what
`sampling_parameters` may hold are the fields of `/v1/completions`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import msgspec

from common.errors import InvalidArgumentError, NotFoundError
from common.sampling import parameters
from common.types import SampledToken
from common.validation import check_request_id
from router.api.api_keys import current_client
from router.api.asking import Call, requests_of
from router.api.oip.tensors import Tensor, Value, one_value, text_of, vector
from router.api.rest.openai.generation_bodies import CompletionBody
from router.api.rest.openai.parsing import parse
from router.fleet.served_model import ServedModel
from router.limits.gate import HeldBytes
from router.running.request import GenerationRequest, Output, Prompt, new_request_id
from router.serving.choices import likeliest
from router.serving.gateway import Gateway
from text.tokenizer import Tokenizer

VERSION = "1"  # of each model
PLATFORM = "baton"
EXTENSIONS = ("binary_tensor_data",)

TEXT, SAMPLING, STREAM, WITHOUT_INPUT = "text_input", "sampling_parameters", "stream", "exclude_input_in_output"
TEXT_OUTPUT = "text_output"
OUTPUTS = {  # beside the text; each if its flag asks for it, or if it is among the requested outputs
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
FLAGS = {f"return_{name}": name for name in OUTPUTS}
INPUT_TYPES = {TEXT: "BYTES", SAMPLING: "BYTES", STREAM: "BOOL", WITHOUT_INPUT: "BOOL", **dict.fromkeys(FLAGS, "BOOL")}
OUTPUT_TYPES = {TEXT_OUTPUT: "BYTES", **OUTPUTS}

# A door's own parameters, which say what form the answer has, are few.
MAX_PARAMETERS = len(CompletionBody.__struct_fields__) + 8

_OF_THE_TENSORS = {"model": "model_name", "prompt": TEXT, "stream": STREAM}
_UNTOLD = (  # fields of completions for which an answer has no tensor
    "echo",
    "include_metrics",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream_options",
)
_NUMBERS = frozenset(
    alias
    for name, one in parameters().items()
    if one.type in (int, float, bool, int | None, float | None, bool | None)
    for alias in (name, *one.rest_aliases)
) | {"n", "best_of", "priority", "length_penalty", "use_beam_search", "early_stopping", "logprobs"}


@dataclass(slots=True, frozen=True, kw_only=True)
class InferRequest:
    """What came, whatever it came by."""

    model: str
    version: str = ""
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[str] = ()  # names of those that are wanted; empty: the text, and what flags ask for
    parameters: Mapping[str, object] = field(default_factory=dict)


class Inference:
    """One request, understood. Raises `InvalidArgumentError` for what is unknown, missing or wrong, by the client's
    name for it."""

    def __init__(self, request: InferRequest, *, may_stream: bool) -> None:
        check_version(request.version)
        tensors = _by_name(request.inputs)
        if TEXT not in tensors:
            raise InvalidArgumentError(TEXT, "is required")
        text = text_of(tensors[TEXT])
        self.streams = _flag(tensors, STREAM)
        if self.streams and not may_stream:
            raise InvalidArgumentError(STREAM, "is for ModelStreamInfer: this call has one response")
        without = _flag(tensors, WITHOUT_INPUT, default=self.streams)
        if self.streams and not without:
            raise InvalidArgumentError(WITHOUT_INPUT, "must be true for a stream")
        self.text_before = "" if without else text
        self.wanted = _wanted(request.outputs, tensors)
        sampling = _sampling(tensors.get(SAMPLING), request.parameters)
        fields = {**sampling, "prompt": text, "model": request.model, "stream": self.streams}
        if "cumulative_logprob" in self.wanted:
            fields.setdefault("logprobs", 0)
        try:
            self.body = parse(CompletionBody, msgspec.json.encode(fields))
            self.body.check()
            self.session = self.body.session()
        except InvalidArgumentError as error:
            raise InvalidArgumentError(field_name(error.field), error.reason) from error
        if self.streams and self.body.choices.n != 1:
            raise InvalidArgumentError(f"{SAMPLING}.n", "must be 1 for a stream")
        self.has_logprobs = sampling.get("logprobs") is not None


def field_name(name: str) -> str:
    """The client's name for a field of a completion's body."""
    return _OF_THE_TENSORS.get(name) or (f"{SAMPLING}.{name}" if name else SAMPLING)


def request_id_of(given: str, headers: Mapping[str, str]) -> str:
    """The id that logs and traces tell: the header's, or else the request's own if it is one for Baton, or a new one.
    Raises `InvalidArgumentError` for a header that is none."""
    if (of_header := headers.get("x-request-id")) is not None:
        check_request_id(of_header, "x-request-id")
        return of_header
    with contextlib.suppress(InvalidArgumentError):
        check_request_id(given)
        return given
    return new_request_id()


def check_version(version: str) -> None:
    """Raises `NotFoundError`."""
    if version not in ("", VERSION):
        raise NotFoundError(f"version {version[:40]!r} does not exist: each model has version {VERSION}")


def check_numbers(inputs: int, outputs: int, parameters: int) -> None:
    """How many of each a request has. Ask before any is looked at: a message has room for millions, and who sends more
    than there are repeats one or sends an unknown one. Raises `InvalidArgumentError`."""
    for name, num, most in (
        ("inputs", inputs, len(INPUT_TYPES)),
        ("outputs", outputs, len(OUTPUT_TYPES)),
        ("parameters", parameters, MAX_PARAMETERS),
    ):
        if num > most:
            raise InvalidArgumentError(name, f"has {num} entries, and may have {most}")


async def infer(
    gateway: Gateway, inference: Inference, call: Call, held: HeldBytes
) -> AsyncGenerator[list[Tensor], None]:
    """The tensors of each response: of several for a stream, of one otherwise."""
    body = inference.body

    async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
        special, client = body.add_special_tokens is not False, current_client.get()
        prepare = gateway.preparation.prompts
        return await prepare(model, body.prompts(), TEXT, add_special_tokens=special, keep=keep, client=client)

    with contextlib.ExitStack() as within:
        requests, _ = await requests_of(gateway, body, prompts, call, within, field_name)
        choices = body.choices
        outputs = gateway.generation.outputs(requests, held.grow)
        if choices.are_compared:
            outputs = likeliest(outputs, choices, held.grow)
        answer = _Answer(inference, requests[0])
        async with aclosing(outputs):
            if inference.streams:
                async for _, output in outputs:
                    if output.text or output.tokens or output.finish_reason:
                        yield answer.tensors([_Piece([output])])
                return
            pieces = [_Piece([]) for _ in range(choices.n)]
            async for index, output in outputs:
                held.grow(output.num_kept_bytes)
                pieces[index].outputs.append(output)
        yield answer.tensors(pieces)


@dataclass(slots=True)
class _Piece:
    """Of one choice: what one response tells."""

    outputs: list[Output]

    @property
    def tokens(self) -> list[SampledToken]:
        return [token for output in self.outputs for token in output.tokens]


class _Answer:
    def __init__(self, inference: Inference, request: GenerationRequest) -> None:
        self._inference = inference
        self._request = request
        self._logprob = 0.0  # of a stream's tokens so far

    def tensors(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """Of the choices of one response."""
        made: dict[str, Callable[[_Piece], Value]] = {
            TEXT_OUTPUT: self._text,
            "finish_reason": lambda piece: str(piece.outputs[-1].finish_reason).encode(),  # "None" before the end
            "cumulative_logprob": self._cumulative,
            "logprobs": self._logprobs,
            "num_output_tokens": lambda piece: len(piece.tokens),
        }
        told = []
        for name in self._inference.wanted:
            if name == "num_input_tokens":
                told.append(vector(name, "UINT32", [len(self._request.prompt_token_ids)]))
            else:
                told.append(vector(name, OUTPUT_TYPES[name], [made[name](piece) for piece in pieces]))
        return told

    def _text(self, piece: _Piece) -> bytes:
        return (self._inference.text_before + "".join(output.text for output in piece.outputs)).encode()

    def _cumulative(self, piece: _Piece) -> float:
        logprob = sum(token.logprob or 0.0 for token in piece.tokens)
        if not self._inference.streams:
            return logprob
        self._logprob += logprob
        return self._logprob

    def _logprobs(self, piece: _Piece) -> bytes:
        if not self._inference.has_logprobs:
            return b"null"
        tokenizer = self._request.model.tokenizer
        return json.dumps([_token_logprobs(token, tokenizer) for token in piece.tokens]).encode()


def _token_logprobs(token: SampledToken, tokenizer: Tokenizer) -> dict[int, dict[str, object]]:
    """Of the sampled token and of the likeliest ones, by id. `rank`: 1 is the likeliest; None if the sampled token is
    none of those that were asked for."""
    ranks = {one.token_id: rank for rank, one in enumerate(token.top_logprobs, 1)}
    logprobs = {token.token_id: token.logprob, **{one.token_id: one.logprob for one in token.top_logprobs}}
    return {
        token_id: {
            "logprob": logprob,
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.decode([token_id], skip_special_tokens=False),
        }
        for token_id, logprob in logprobs.items()
    }


def _by_name(inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name not in INPUT_TYPES:
            raise InvalidArgumentError(
                tensor.name[:100] or "inputs", f"is no input: there are {', '.join(INPUT_TYPES)}"
            )
        if tensor.name in tensors:
            raise InvalidArgumentError(tensor.name, "is given twice")
        tensors[tensor.name] = tensor
    return tensors


def _flag(tensors: Mapping[str, Tensor], name: str, *, default: bool = False) -> bool:
    return bool(one_value(tensors[name], "BOOL")) if name in tensors else default


def _wanted(outputs: Sequence[str], tensors: Mapping[str, Tensor]) -> list[str]:
    for name in outputs:
        if name not in OUTPUT_TYPES:
            raise InvalidArgumentError("outputs", f"{name[:100]!r} is no output: there are {', '.join(OUTPUT_TYPES)}")
    flagged = [output for flag, output in FLAGS.items() if _flag(tensors, flag)]
    return [name for name in OUTPUT_TYPES if name in (outputs or (TEXT_OUTPUT,)) or name in flagged]


def _sampling(tensor: Tensor | None, given: Mapping[str, object]) -> dict[str, object]:
    """What `sampling_parameters` says, or else the request's own parameters. Triton's clients write numbers as texts,
    too: {"temperature": "0.1"}."""
    sampling = dict(given)
    if tensor is not None:
        if given:
            raise InvalidArgumentError("parameters", f"set either these or {SAMPLING}, not both")
        sampling = _json_object(text_of(tensor))
    for name, value in sampling.items():
        if name in _OF_THE_TENSORS:
            raise InvalidArgumentError(f"{SAMPLING}.{name}", f"is said by {_OF_THE_TENSORS[name]}")
        if name == "request_id":
            raise InvalidArgumentError(f"{SAMPLING}.{name}", "is said by the request's id")
        if name in _UNTOLD and value not in (None, False):
            raise InvalidArgumentError(f"{SAMPLING}.{name}", "is not supported: no output would tell it")
        if isinstance(value, float) and not math.isfinite(value):  # gRPC's can be, and JSON has no word for them
            raise InvalidArgumentError(f"{SAMPLING}.{name}", f"must be a finite number, not {value}")
        if name in _NUMBERS and isinstance(value, str):
            with contextlib.suppress(msgspec.DecodeError):
                sampling[name] = msgspec.json.decode(value.lower())
    return sampling


def _json_object(text: str) -> dict[str, object]:
    try:
        decoded = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgumentError(SAMPLING, f"is not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidArgumentError(SAMPLING, "must be a JSON object")
    return cast("dict[str, object]", decoded)
