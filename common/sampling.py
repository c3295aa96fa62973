"""The sampling parameters: what each is called, its type, bounds, default and help, said once.

REST, gRPC, the Python client, the command line and the engine all take theirs from `SamplingParams`. A new parameter is
a field there, one in `SamplingOptions` (for editors and type checkers), one in `protos/baton/v1/types.proto`, and what
the engine does with it. Its value may be a number, a text, a list, a mapping, or a dataclass of such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields, replace
from types import GenericAlias, UnionType
from typing import Annotated, TypedDict, TypeVar, cast, get_args, get_type_hints

from annotated_types import MaxLen
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic import ValidationInfo as Info
from pydantic.fields import FieldInfo

from common.errors import InvalidArgumentError
from common.guided import Guided, check_guided
from common.validation import ModelLimits
from common.value_errors import refusal

MAX_LOGPROBS = 20
DEFAULT_ROOM = 16  # tokens of an answer that has no max_tokens, for which a prompt that is cut leaves room
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BANNED_SEQUENCES = 2 * MAX_BAD_WORDS  # each word has two
MAX_BANNED_TOKENS = 64  # of one sequence

GivenSampling = Mapping[str, object]
"""The parameters that a client set, by name. What it left out is missing here."""

TypeForm = type | GenericAlias | UnionType

IdsT = TypeVar("IdsT", tuple[int, ...], dict[int, float])

FieldName = Callable[[str], str]
"""From the name of a parameter to the name that the client used."""


@dataclass(slots=True, frozen=True)
class RestAlias:
    """A further name of a parameter in REST."""

    name: str


def _in_vocabulary(ids: IdsT, info: Info) -> IdsT:
    limits = cast("ModelLimits | None", info.context)
    if limits is None:  # a client's own settings: the server knows its vocabulary
        return ids
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            place = "" if isinstance(ids, dict) else f" (at index {index})"
            raise ValueError(f"token id {token_id}{place} is outside the vocabulary of {limits.vocab_size} tokens")
    return ids


def _not_all(value: object) -> object:
    if value == -1:
        raise ValueError(f"must be at most {MAX_LOGPROBS}: -1 asks for those of all the vocabulary")
    return value


def _not_nothing(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be -1 or at least 1, not 0")
    return value


def _off(value: object) -> object:
    return 0 if value == -1 else value  # as vLLM's clients say it


Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict(), Field(ge=-(2**31), le=2**31 - 1)]
LongInteger = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenIds = Annotated[
    tuple[Annotated[int, Strict()], ...], Field(max_length=MAX_TOKEN_IDS), AfterValidator(_in_vocabulary)
]
TokenBiases = Annotated[
    dict[Annotated[int, Strict()], Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_TOKEN_IDS),
    AfterValidator(_in_vocabulary),
]


@dataclass(slots=True, frozen=True, kw_only=True)
class TokenSequence:
    """Tokens, one after the other."""

    # The edge makes these before the model and its vocabulary are known.
    __pydantic_config__ = ConfigDict(extra="forbid", revalidate_instances="always")

    token_ids: Annotated[
        tuple[Annotated[int, Strict()], ...],
        Field(min_length=1, max_length=MAX_BANNED_TOKENS),
        AfterValidator(_in_vocabulary),
    ]


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    `seed` decides every draw together with the token's position, so that a request gives the same tokens on whichever
    worker it continues.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="always")

    temperature: Annotated[Number, Field(ge=0, description="below 1 likely tokens are likelier still; 0 is greedy")] = (
        1.0
    )
    top_p: Annotated[
        Number,
        Field(ge=0, le=1, description="sample from the likeliest tokens of this total probability; 0 is greedy"),
    ] = 1.0
    top_k: Annotated[
        Integer, Field(ge=0, description="sample from this many likeliest tokens; 0 is off"), BeforeValidator(_off)
    ] = 0
    min_p: Annotated[
        Number, Field(ge=0, le=1, description="drop tokens less likely than this share of the likeliest")
    ] = 0.0
    seed: Annotated[LongInteger, Field(description="equal seeds give equal answers; drawn if unset")] = 0
    max_tokens: Annotated[
        Integer,
        Field(ge=1, description="most tokens of the answer; what is left of the context if unset"),
        RestAlias("max_completion_tokens"),
    ] = 16
    min_tokens: Annotated[Integer, Field(ge=0, description="no end before this many tokens")] = 0
    stop: Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)], ...],
        Field(max_length=MAX_STOP_STRINGS, description="the answer ends before this text"),
    ] = ()
    include_stop_str_in_output: Annotated[
        Flag, Field(description="the answer has the text of stop that ended it, at its end")
    ] = False
    stop_token_ids: Annotated[TokenIds, Field(description="the answer ends with one of these tokens")] = ()
    ignore_eos: Annotated[Flag, Field(description="the model's end of sequence ends nothing")] = False
    logprobs: Annotated[
        Integer | None,
        Field(ge=0, le=MAX_LOGPROBS, description="report each token's logprob, and those of this many likeliest ones"),
        BeforeValidator(_not_all),
    ] = None
    prompt_logprobs: Annotated[
        Integer | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="report the logprob of each token of the prompt, and those of this many likeliest ones",
        ),
        BeforeValidator(_not_all),
    ] = None
    truncate_prompt_tokens: Annotated[
        Integer | None,
        Field(
            ge=-1,
            description="keep so many tokens of the prompt, the last ones; -1: as many as leave room for the answer",
        ),
        AfterValidator(_not_nothing),
    ] = None
    presence_penalty: Annotated[
        Number, Field(ge=-2, le=2, description="taken from the logits of tokens that the answer has")
    ] = 0.0
    frequency_penalty: Annotated[
        Number, Field(ge=-2, le=2, description="taken from them once for each time that the answer has them")
    ] = 0.0
    repetition_penalty: Annotated[
        Number, Field(gt=0, le=100, description="divides the logits of tokens that prompt or answer have")
    ] = 1.0
    logit_bias: Annotated[TokenBiases, Field(description="added to the logits of these tokens")] = field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[
        TokenIds, Field(description="the answer has only these tokens; any if none are given")
    ] = ()
    bad_words: Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)], ...],
        Field(
            max_length=MAX_BAD_WORDS,
            description="texts that the answer has not, as the model writes them, with a space before and without",
        ),
    ] = ()
    bad_words_ids: Annotated[
        tuple[TokenSequence, ...],
        Field(max_length=MAX_BANNED_SEQUENCES, description="sequences of tokens that the answer has not"),
    ] = ()
    speculate: Annotated[
        Flag, Field(description="the worker may guess tokens of the answer ahead, if it is set to; no token changes")
    ] = True
    guided: Annotated[
        Guided | None, Field(description="the answer has this form: a JSON schema, a regex, a choice, a grammar")
    ] = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether anything except a grammar changes which token is the likeliest."""
        bans = self.min_tokens or self.allowed_token_ids or self.bad_words_ids
        return bool(bans or self.logit_bias or self.has_penalties)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class GuidedOptions(TypedDict, total=False):
    """`Guided` as a mapping; exactly one of these."""

    json_schema: str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    structural_tag: str


class SamplingOptions(TypedDict, total=False):
    """`SamplingParams` as keyword arguments; what is left out is the server's to decide."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    truncate_prompt_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_words_ids: Sequence[TokenSequence | Mapping[str, Sequence[int]]]
    speculate: bool
    guided: Guided | GuidedOptions


@dataclass(slots=True, frozen=True)
class Parameter:
    """Description of one field of `SamplingParams`, from which flags, REST fields and help texts are made."""

    type: TypeForm  # without bounds: `tuple[str, ...]`, `int | None`
    help: str
    default: object  # None if each request decides it
    max_entries: int | None  # of a list or mapping
    rest_aliases: tuple[str, ...]

    @property
    def is_texts(self) -> bool:
        """Whether the value is a list of texts. A client may give a single text without a list."""
        return self.type == tuple[str, ...]


@functools.cache
def parameters() -> dict[str, Parameter]:
    """Every sampling parameter, by name."""
    plain, annotated = get_type_hints(SamplingParams), get_type_hints(SamplingParams, include_extras=True)
    defaults = {one.name: None if one.default is MISSING else one.default for one in fields(SamplingParams)}
    made = {}
    for name, annotation in annotated.items():
        info = FieldInfo.from_annotation(annotation)
        made[name] = Parameter(
            plain[name],
            info.description or "",
            None if name in ("seed", "max_tokens") else defaults[name],
            next((bound.max_length for bound in info.metadata if isinstance(bound, MaxLen)), None),
            tuple(alias.name for alias in get_args(annotation) if isinstance(alias, RestAlias)),
        )
    return made


def resolve(
    given: GivenSampling,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    draw_seed: Callable[[], int],
    default_max_tokens: int | None = None,
    name: FieldName = str,
) -> SamplingParams:
    """Checks every value and fills in defaults: `checked`, then `fitted`."""
    return fitted(
        checked(given, limits, name=name),
        given,
        limits,
        num_prompt_tokens=num_prompt_tokens,
        draw_seed=draw_seed,
        default_max_tokens=default_max_tokens,
        name=name,
    )


def checked(given: GivenSampling, limits: ModelLimits, *, name: FieldName = str) -> SamplingParams:
    """All that does not depend on the prompt: once for all prompts of a body, as lists may be long.

    Raises `InvalidArgumentError` with the field as the client wrote it.
    """
    for field_name, value in given.items():
        most = parameters()[field_name].max_entries if field_name in parameters() else None
        if most is not None and isinstance(value, Sized) and len(value) > most:  # before each entry is looked at
            raise InvalidArgumentError(name(field_name), f"must have at most {most} entries, not {len(value)}")
    try:
        params = _adapter().validate_python(given, context=limits)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0], name) from error
    _check_tokens(params, limits, name)
    if params.guided is not None:
        _check_guided(params, params.guided, name)
    return replace(params, temperature=0.0, top_p=1.0) if params.top_p == 0 else params  # no worker draws from nothing


def _check_tokens(params: SamplingParams, limits: ModelLimits, name: FieldName) -> None:
    """Refuses to prefer or to demand ids that cannot be drawn."""
    places = {token_id: f"{name('logit_bias')}.{token_id}" for token_id in params.logit_bias}
    listed = name("allowed_token_ids")
    places |= {token_id: f"{listed}[{index}]" for index, token_id in enumerate(params.allowed_token_ids)}
    for token_id, place in places.items():
        if not limits.is_token(token_id):
            raise InvalidArgumentError(place, f"{token_id} is an id that the model has and no token has: never drawn")


def kept_tokens(
    given: GivenSampling, limits: ModelLimits, *, default_max_tokens: int = DEFAULT_ROOM, name: FieldName = str
) -> int | None:
    """How many tokens a prompt may have, the last ones, if `truncate_prompt_tokens` cuts it; None: all. To be called
    before there is a prompt, and so before the other parameters are checked.

    Raises `InvalidArgumentError` with the field as the client wrote it.
    """
    field_name = "truncate_prompt_tokens"
    if given.get(field_name) is None:
        return None
    most = checked({field_name: given[field_name]}, limits, name=name).truncate_prompt_tokens
    if most is None or most > limits.max_model_len:
        raise InvalidArgumentError(
            name(field_name), f"must be at most {limits.max_model_len}, the model's context in tokens, not {most}"
        )
    if most > 0:
        return most
    max_tokens = given.get("max_tokens")
    room = max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else default_max_tokens
    return max(limits.max_model_len - room, 1)


def fitted(
    params: SamplingParams,
    given: GivenSampling,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    draw_seed: Callable[[], int],
    default_max_tokens: int | None = None,
    name: FieldName = str,
) -> SamplingParams:
    """`params`, made of `given`, for one prompt. `default_max_tokens` None: what is left of the model's context.

    `draw_seed` is called if sampling is random and the client gave no seed, so that whichever worker continues the
    request draws the same tokens. Raises `InvalidArgumentError` with the field as the client wrote it.
    """
    room = limits.max_model_len - num_prompt_tokens
    max_tokens = params.max_tokens
    if "max_tokens" not in given:
        max_tokens = room if default_max_tokens is None else min(max(default_max_tokens, params.min_tokens), room)
    elif max_tokens > room:
        raise InvalidArgumentError(
            name("max_tokens"),
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the model's context of "
            f"{limits.max_model_len} tokens",
        )
    if params.min_tokens > max_tokens:
        raise InvalidArgumentError(name("min_tokens"), f"{params.min_tokens} is more than max_tokens, {max_tokens}")
    seed = params.seed if "seed" in given or params.is_greedy else draw_seed()
    return replace(params, max_tokens=max_tokens, seed=seed, top_k=min(params.top_k, limits.vocab_size))


def _check_guided(params: SamplingParams, guided: Guided, name: FieldName) -> None:
    try:
        check_guided(guided)
    except ValueError as error:
        raise InvalidArgumentError(name("guided"), str(error)) from error
    if params.ignore_eos:
        raise InvalidArgumentError(name("ignore_eos"), "is not for guided text: its form says where it ends")
    if params.min_tokens:
        raise InvalidArgumentError(name("min_tokens"), "is not for guided text: its form says where it ends")


JsonSchemas = dict[str, dict[str, object]]


def json_schemas(ref_template: str) -> tuple[JsonSchemas, JsonSchemas]:
    """(each parameter's JSON Schema, the schemas that these refer to by `ref_template`)."""
    schema = _adapter().json_schema(ref_template=ref_template)
    for name, one in schema["properties"].items():
        one.pop("title", None)  # a reference to another schema has none
        if parameters()[name].default is None:
            one.pop("default", None)
    return schema["properties"], schema.get("$defs", {})


@functools.cache
def _adapter() -> TypeAdapter[SamplingParams]:
    return TypeAdapter(SamplingParams)
