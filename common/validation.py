"""Everything that can be wrong with a request, checked in one place for gRPC and REST alike.

Each function raises `InvalidArgumentError` with the field as the client wrote it. Numbers are taken as they come off
the wire; types are the wire's own business. Nothing here tokenizes: what can be refused by length alone is refused
before any work is done on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidArgumentError, UnknownModelError
from common.types import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
CHAT_ROLES = ("system", "developer", "user", "assistant")

_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]+", re.ASCII)

FieldName = Callable[[str], str]
"""From a name of `SamplingFields` to the name that the client used."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelLimits:
    """What the served model can take."""

    model: str  # name that clients use
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int
    max_token_bytes: int  # UTF-8 length of the longest vocabulary entry

    @property
    def max_prompt_bytes(self) -> int:
        """A text longer than this has more than `max_model_len` tokens, however it is split."""
        return self.max_model_len * self.max_token_bytes


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingFields:
    """Sampling parameters as a client sent them; None (or empty) where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def check_model(model: str, limits: ModelLimits) -> None:
    """An empty name means the model that is served. Raises `UnknownModelError` for any other name."""
    if model and model != limits.model:
        raise UnknownModelError(model, limits.model)


def check_request_id(request_id: str, name: str = "request_id") -> None:
    if not request_id:
        raise InvalidArgumentError(name, "must not be empty")
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidArgumentError(name, f"must have at most {MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}")
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgumentError(name, "may only contain ASCII letters, digits and . _ : / + = @ -")


def check_cache_salt(cache_salt: str, name: str = "cache_salt") -> None:
    if len(cache_salt) > MAX_SALT_CHARS:
        raise InvalidArgumentError(name, f"must have at most {MAX_SALT_CHARS} characters, not {len(cache_salt)}")


def chat_role(role: str, name: str) -> str:
    """The role as chat templates know it: newer clients say `developer` for what models call `system`."""
    if role == "developer":
        return "system"
    if role not in CHAT_ROLES:
        raise InvalidArgumentError(name, f"must be one of {', '.join(CHAT_ROLES)}, not {role!r}")
    return role


def check_priority(priority: int, name: str = "priority") -> None:
    if priority != 0:
        raise InvalidArgumentError(name, f"must be 0, not {priority}: every request runs in the order of its arrival")


def check_text(text: str, limits: ModelLimits, name: str) -> None:
    """Refuses a text before it is tokenized: empty, not encodable, or certainly too long."""
    if not text:
        raise InvalidArgumentError(name, "must not be empty")
    # Characters are at most four bytes each, so most texts need no second look.
    if len(text) * 4 <= limits.max_prompt_bytes and text.isascii():
        return
    if len(text) > limits.max_prompt_bytes or len(encoded(text, name)) > limits.max_prompt_bytes:
        raise InvalidArgumentError(
            name,
            f"is too long: {len(text)} characters cannot fit into {limits.max_model_len} tokens, the model's context",
        )


def encoded(text: str, name: str) -> bytes:
    """UTF-8 bytes of `text`. JSON can carry lone surrogates, which no tokenizer takes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(name, f"is not valid Unicode: {error.reason} at character {error.start}") from error


def check_prompt(prompt_token_ids: Sequence[int], limits: ModelLimits, name: str) -> None:
    """The prompt must be there, lie inside the vocabulary, and leave room for one token."""
    if not prompt_token_ids:
        raise InvalidArgumentError(name, "must not be empty")
    if len(prompt_token_ids) >= limits.max_model_len:
        raise InvalidArgumentError(
            name,
            f"is too long: {len(prompt_token_ids)} tokens leave no room for an answer in the model's context of "
            f"{limits.max_model_len} tokens",
        )
    check_token_ids(prompt_token_ids, limits, name)


def check_messages(num_messages: int, limits: ModelLimits, name: str) -> None:
    """Refuses a conversation before it is rendered: none, or more messages than tokens of the context."""
    if not num_messages:
        raise InvalidArgumentError(name, "must not be empty")
    most = min(MAX_MESSAGES, limits.max_model_len)
    if num_messages > most:
        raise InvalidArgumentError(name, f"must have at most {most} messages, not {num_messages}")


def check_token_count(num_tokens: int, limits: ModelLimits, name: str) -> None:
    if num_tokens > limits.max_model_len:
        raise InvalidArgumentError(
            name, f"must have at most {limits.max_model_len} tokens, the model's context, not {num_tokens}"
        )


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, name: str) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
    raise InvalidArgumentError(
        name, f"token id {token_id} (at index {index}) is outside the vocabulary of {limits.vocab_size} tokens"
    )


def validate_sampling(
    fields: SamplingFields,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    draw_seed: Callable[[], int],
    default_max_tokens: int | None = None,
    name: FieldName = str,
) -> SamplingParams:
    """Checks each field and fills in defaults. `default_max_tokens` None: what is left of the model's context.

    `draw_seed` is called where sampling is random and the client gave no seed, so that whichever worker continues the
    request draws the same tokens.
    """
    temperature = _number(fields.temperature, 1.0, name("temperature"), low=0)
    top_k = 0 if fields.top_k in (None, -1) else _integer(fields.top_k, 0, name("top_k"), low=0)
    max_tokens, min_tokens = _token_limits(fields, limits, num_prompt_tokens, default_max_tokens, name)
    seed = fields.seed
    if seed is None:
        seed = draw_seed() if temperature > 0 else 0
    elif seed not in _INT64:
        raise InvalidArgumentError(name("seed"), "must be a 64-bit integer")
    if fields.logprobs is not None:
        _integer(fields.logprobs, 0, name("logprobs"), low=0, high=MAX_LOGPROBS)
    if len(fields.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(name("stop_token_ids"), f"must have at most {MAX_STOP_TOKEN_IDS} entries")
    check_token_ids(fields.stop_token_ids, limits, name("stop_token_ids"))
    return SamplingParams(
        temperature=temperature,
        top_p=_number(fields.top_p, 1.0, name("top_p"), low=0, high=1, above_low=True),
        top_k=min(top_k, limits.vocab_size),
        min_p=_number(fields.min_p, 0.0, name("min_p"), low=0, high=1),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop_strings(fields.stop, name("stop")),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        presence_penalty=_number(fields.presence_penalty, 0.0, name("presence_penalty"), low=-2, high=2),
        frequency_penalty=_number(fields.frequency_penalty, 0.0, name("frequency_penalty"), low=-2, high=2),
        repetition_penalty=_number(
            fields.repetition_penalty, 1.0, name("repetition_penalty"), low=0, high=100, above_low=True
        ),
        logit_bias=_logit_bias(fields.logit_bias, limits, name("logit_bias")),
    )


def _token_limits(
    fields: SamplingFields,
    limits: ModelLimits,
    num_prompt_tokens: int,
    default_max_tokens: int | None,
    name: FieldName,
) -> tuple[int, int]:
    """(max_tokens, min_tokens)."""
    room = limits.max_model_len - num_prompt_tokens
    min_tokens = _integer(fields.min_tokens, 0, name("min_tokens"), low=0)
    if fields.max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(max(default_max_tokens, min_tokens), room)
    else:
        max_tokens = _integer(fields.max_tokens, 0, name("max_tokens"), low=1)
        if max_tokens > room:
            raise InvalidArgumentError(
                name("max_tokens"),
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the model's context of "
                f"{limits.max_model_len} tokens",
            )
    if min_tokens > max_tokens:
        raise InvalidArgumentError(name("min_tokens"), f"{min_tokens} is more than max_tokens, {max_tokens}")
    return max_tokens, min_tokens


def _stop_strings(stop: Sequence[str], name: str) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(name, f"must have at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for text in stop:
        if not text:
            raise InvalidArgumentError(name, "must not contain an empty string")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidArgumentError(name, f"each string must have at most {MAX_STOP_STRING_CHARS} characters")
    return tuple(stop)


def check_num_biases(num: int, name: str) -> None:
    if num > MAX_LOGIT_BIAS:
        raise InvalidArgumentError(name, f"must have at most {MAX_LOGIT_BIAS} entries, not {num}")


def _logit_bias(bias: Mapping[int, float], limits: ModelLimits, name: str) -> dict[int, float]:
    check_num_biases(len(bias), name)
    check_token_ids(list(bias), limits, name)
    return {token_id: _number(value, 0.0, name, low=-100, high=100) for token_id, value in bias.items()}


def _number(
    value: float | None,
    default: float,
    name: str,
    *,
    low: float,
    high: float | None = None,
    above_low: bool = False,
) -> float:
    """`value` in [low, high], or (low, high] with `above_low`; finite in any case."""
    if value is None:
        return default
    if not math.isfinite(value):
        raise InvalidArgumentError(name, f"must be a finite number, not {value}")
    if value < low or (above_low and value == low) or (high is not None and value > high):
        if high is None:
            wanted = f"{'above' if above_low else 'at least'} {low:g}"
        else:
            wanted = f"in {'(' if above_low else '['}{low:g}, {high:g}]"
        raise InvalidArgumentError(name, f"must be {wanted}, not {value:g}")
    return float(value)


def _integer(value: int | None, default: int, name: str, *, low: int, high: int = _INT32.stop - 1) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        wanted = f"at least {low}" if high == _INT32.stop - 1 and value < low else f"in [{low}, {high}]"
        raise InvalidArgumentError(name, f"must be {wanted}, not {value}")
    return value
