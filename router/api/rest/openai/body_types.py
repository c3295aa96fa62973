"""What all bodies of REST requests are made of: shared fields, those of the sampling parameters among them, and what a
field's value asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import ClassVar, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from common.cache_hints import Retain
from common.errors import InvalidArgumentError
from common.sampling import FieldName, parameters
from common.targets import LatencyTargets, check_targets
from router.api.rest.http.error_body import REQUEST_ID_HEADERS
from router.limits.targets import NOTHING_GIVEN, GivenTargets, given_in_body

GivenRaw = Raw | UnsetType
"""A value that is not decoded, since all that matters is whether it asks for something (`asks`)."""


_SPACES = b" \t\r\n"

_PARAMETERS = [(name, parameter.is_texts) for name, parameter in parameters().items()]
ALIASES_OF = {name: parameter.rest_aliases for name, parameter in parameters().items()}
"""Other names of a sampling parameter, which clients of other servers use."""
ALIASES = [(name, alias) for name, aliases in ALIASES_OF.items() for alias in aliases]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kinds: ClassVar[tuple[str, ...]] = ()
    """What `type` may be, of an object of which others have kinds with fields of their own."""


BodyT = TypeVar("BodyT", bound=Body)


def with_sampling(body: type[BodyT]) -> type[BodyT]:
    """`body` with a field for each sampling parameter that it does not declare itself, and for their other names."""
    fields: list[tuple[str, object, None]] = []
    for name, parameter in parameters().items():
        kind = parameter.type | str | None if parameter.is_texts else parameter.type | None
        names = (name, *parameter.rest_aliases)
        fields += [(one, kind, None) for one in names if one not in body.__struct_fields__]
    made = msgspec.defstruct(
        body.__name__, fields, bases=(body,), module=body.__module__, kw_only=True, forbid_unknown_fields=True
    )
    return cast("type[BodyT]", made)


def parameters_in(body: Body, field_name: FieldName = str, renamed: Collection[str] = frozenset()) -> dict[str, object]:
    """The sampling parameters that the client set in `body`. `field_name`: the field that has the value of one that is
    among the `renamed`."""
    given = {}
    for name, is_texts in _PARAMETERS:
        value = getattr(body, field_name(name) if name in renamed else name)
        if value is not None:
            given[name] = (value,) if is_texts and isinstance(value, str) else value
    return given


class RetainBody(Body, kw_only=True):
    """Asks to keep the prompt's KV for a while."""

    seconds: float
    num_tokens: int | None = None

    def value(self) -> Retain:
        return Retain(self.seconds, self.num_tokens or 0)


class SloBody(Body, kw_only=True):
    """Latency targets, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class AnswerBody(Body, kw_only=True):
    """What all bodies that ask for an answer have in common."""

    model: str | None = None
    stream: bool | None = None

    # Baton's own, by the names that they have in gRPC.
    cache_salt: str | None = None
    retain: RetainBody | None = None
    priority: int | None = None
    slo: SloBody | None = None
    slo_class: str | None = None
    request_id: str | None = None

    # OpenAI's. Each names a session, whose requests should go to one worker.
    prompt_cache_key: GivenRaw = UNSET
    user: GivenRaw = UNSET

    # OpenAI's, for its own records, its store of answers and its tiers of service.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: GivenRaw = UNSET
    prompt_cache_options: GivenRaw = UNSET

    id_headers: ClassVar[tuple[str, ...]] = REQUEST_ID_HEADERS  # of the answer

    def targets(self) -> GivenTargets:
        """Raises `InvalidArgumentError`."""
        return targets_of(self.slo, self.slo_class)

    def retained(self, _most_s: float) -> Retain | None:
        """How long the client wants the prompt's KV kept. `most_s`: the longest that this router keeps any."""
        return None if self.retain is None else self.retain.value()

    def session(self) -> str:
        """The session that the body names; empty if it names none. Raises `InvalidArgumentError`."""
        return session_of(self)

    def check_service_tier(self) -> None:
        given = self.service_tier
        if given not in (None, "auto", "default"):
            raise InvalidArgumentError("service_tier", f'must be "auto" or "default", not {given!r}: there is one tier')


def session_of(body: Body) -> str:
    """The session that `prompt_cache_key` or `user` of a body names; empty if neither does. Raises
    `InvalidArgumentError`."""
    for name in ("prompt_cache_key", "user"):
        given = getattr(body, name)
        if asks(given):
            try:
                return msgspec.json.decode(given, type=str)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidArgumentError(name, "must be a string") from error
    return ""


def targets_of(slo: SloBody | None, slo_class: str | None) -> GivenTargets:
    """The latency targets that a body names. Raises `InvalidArgumentError`."""
    if slo is None and not slo_class:
        return NOTHING_GIVEN
    given = None if slo is None else LatencyTargets(slo.ttft_ms, slo.tpot_ms)
    if given is not None:
        check_targets(given)
    return given_in_body(given, slo_class or "")


def asks(value: object) -> bool:
    """Whether a value asks for something. Null, false, zero and what is empty do not."""
    if isinstance(value, Raw):
        text = bytes(value).strip(_SPACES)
        is_plain = text in (b"null", b"false", b'""', b"0")
        return not is_plain and text.translate(None, _SPACES) not in (b"[]", b"{}")
    return value is not UNSET and bool(value)


def refuse_if_asked(body: Body, names: Iterable[str], reason: str = "is not supported", *, where: str = "") -> None:
    """Raises `InvalidArgumentError` for the first of these fields that asks for something. `where`: the body's place in
    the request; empty if it is the request's own."""
    for name in names:
        if asks(getattr(body, name)):
            field = name.rstrip("_")  # of what is a keyword here
            raise InvalidArgumentError(f"{where}.{field}" if where else field, reason)


def refuse_unless(body: Body, name: str, *harmless: object, where: str = "") -> None:
    """Raises `InvalidArgumentError` if a field asks for something else than what is done anyway: one of `harmless`."""
    given = getattr(body, name)
    if asks(given) and msgspec.json.decode(given) not in harmless:
        shown = ", ".join(msgspec.json.encode(one).decode() for one in harmless)
        raise InvalidArgumentError(f"{where}.{name}" if where else name, f"only {shown} is supported")


def is_given(value: GivenRaw) -> bool:
    """Whether a value is there. Null is as good as nothing; unlike `asks`, what is empty counts."""
    return isinstance(value, Raw) and bytes(value).strip() != b"null"


def is_list(value: GivenRaw) -> bool:
    """Whether a value that is there is a list."""
    return not is_given(value) or bytes(cast("Raw", value)).lstrip().startswith(b"[")


def several(given: str | list[str | int | list[int]], name: str) -> list[str | list[int]]:
    """The prompts of a field that takes one or several, each a text or token ids. Raises `InvalidArgumentError`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidArgumentError(name, "must not be empty")
    kind = type(given[0])
    if any(type(item) is not kind for item in given):
        raise InvalidArgumentError(name, "must be a text, texts, token ids or lists of token ids, not a mixture")
    if kind is int:
        return [cast("list[int]", given)]
    return cast("list[str | list[int]]", given)
