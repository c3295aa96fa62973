"""Every error that Baton raises on purpose.

BatonError
├── InvalidArgumentError      the request is wrong: names the field        INVALID_ARGUMENT     400
│   └── PreviousResponseError no conversation can be continued by that id
├── NotFoundError             nothing is known by that name                NOT_FOUND            404
│   └── ModelNotFoundError    no such model is served
├── UnauthenticatedError      no API key, or none that is known            UNAUTHENTICATED      401
├── ForbiddenError            a known API key that may not ask this        PERMISSION_DENIED    403
├── OverloadedError           try again after `retry_after_s`              RESOURCE_EXHAUSTED   429
├── UnavailableError          no worker can take it, or one went away      UNAVAILABLE          503
├── IncompatibleError         model, dtype or KV layout differ             FAILED_PRECONDITION  409
├── DeadlineError             the request's own deadline passed            DEADLINE_EXCEEDED    504
├── AbortedError              an operator ended the request                ABORTED              499
├── SlowReaderError           its caller left too much of it unread        ABORTED              408
├── InternalError             a defect of ours                             INTERNAL             500
│   └── LostRankError         a process that computes a part of the model is gone
├── ConfigError               a setting is wrong: names the key            (at start only)
├── StartupError              a process cannot start: one line that says why
└── TransferError             KV did not arrive; becomes a fallback, never a failed request
"""

from __future__ import annotations

from typing import ClassVar, Self


class BatonError(Exception):
    """Root of the tree. `grpc_code` is the name of a `grpc.StatusCode`; this package knows no grpc.

    `field` names what of a request is to blame, as the client wrote it; empty if nothing is. `message` is `reason` with
    that name before it.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, reason: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        self.message = f"{field}: {reason}" if field else reason
        super().__init__(self.message)
        self.field = field
        self.reason = reason
        self.retry_after_s = retry_after_s  # when to try again; None if that is of no use, or not known

    def without_stack(self) -> Self:
        """This error without its traceback and causes, which hold frames and with them the request."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class InvalidArgumentError(BatonError):
    """A request that can never succeed."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason, field=field)


class NotFoundError(BatonError):
    grpc_code = "NOT_FOUND"
    http_status = 404


class ModelNotFoundError(NotFoundError):
    pass


class PreviousResponseError(InvalidArgumentError):
    """No conversation can be continued by the id that the client gave: as in OpenAI's API, that is a field's fault."""

    def __init__(self, reason: str) -> None:
        super().__init__("previous_response_id", reason)


class UnauthenticatedError(BatonError):
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class ForbiddenError(BatonError):
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class OverloadedError(BatonError):
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class UnavailableError(BatonError):
    grpc_code = "UNAVAILABLE"
    http_status = 503

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason, retry_after_s=retry_after_s)


class IncompatibleError(BatonError):
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class DeadlineError(BatonError):
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class AbortedError(BatonError):
    """An operator ended the request. Its client should not try it again, and no worker is asked in place of another.
    `field` tells it from other errors with this code."""

    grpc_code = "ABORTED"
    http_status = 499

    def __init__(self, reason: str) -> None:
        super().__init__(reason, field="request_id")


class SlowReaderError(BatonError):
    """The caller does not read its stream. No other worker would do better, so it is not tried again."""

    grpc_code = "ABORTED"
    http_status = 408


class InternalError(BatonError):
    pass


class LostRankError(InternalError):
    """A process that computes a part of the model is gone, so no step can be computed any more. The message is one line
    that names the rank."""


class ConfigError(BatonError):
    """A setting that is unknown or out of range. `field` is its name in flags, environment or YAML."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason, field=key)


class StartupError(BatonError):
    """A process cannot start. The message is one line for an operator."""


class TransferError(BatonError):
    """A KV block could not be moved."""


def error_of(grpc_code: str, reason: str, *, field: str = "", retry_after_s: float | None = None) -> BatonError:
    """The error for another process's status; `InternalError` if no error here has that code."""
    if grpc_code == InvalidArgumentError.grpc_code:
        return InvalidArgumentError(field, reason)
    if grpc_code == AbortedError.grpc_code and field == "request_id":
        return AbortedError(reason)
    for retriable in (OverloadedError, UnavailableError):
        if grpc_code == retriable.grpc_code:
            return retriable(reason) if retry_after_s is None else retriable(reason, retry_after_s)
    for kind in (
        ModelNotFoundError,
        UnauthenticatedError,
        ForbiddenError,
        IncompatibleError,
        DeadlineError,
        SlowReaderError,
    ):
        if grpc_code == kind.grpc_code:
            return kind(reason, field=field)
    return InternalError(reason, field=field)
