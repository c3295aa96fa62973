"""What the body of an error says: OpenAI's `{"error": {"message", "type", "param", "code"}}`, or Anthropic's
`{"type": "error", "error": {"type", "message"}, "request_id"}` at its own paths. No web framework is needed for it, so
that connections without a request get it, too."""

from __future__ import annotations

from common.errors import (
    BatonError,
    InvalidArgumentError,
    ModelNotFoundError,
    PreviousResponseError,
    UnauthenticatedError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "aborted_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES: dict[type[BatonError], str] = {
    ModelNotFoundError: "model_not_found",
    PreviousResponseError: "previous_response_not_found",
    InvalidArgumentError: "invalid_value",
    UnauthenticatedError: "invalid_api_key",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATH = "/v1/messages"
REQUEST_ID_HEADERS = ("X-Request-Id",)
"""Headers of an answer that name its request."""
ANTHROPIC_ID_HEADERS = (*REQUEST_ID_HEADERS, "Request-Id")
"""Anthropic's clients look for one of their own."""


class NotHttpError(BatonError):
    http_status = 400


class HeadTooLargeError(BatonError):
    http_status = 431


class HeadTooLateError(BatonError):
    http_status = 408


class BodyTooLargeError(BatonError):
    http_status = 413


class BodyTypeError(BatonError):
    http_status = 415


class BodyTooLateError(BatonError):
    http_status = 408


def error_body(error: BatonError) -> dict[str, object]:
    return status_body(error.message, error.http_status, error.field or None, error_code(error))


def error_code(error: BatonError) -> str | None:
    """OpenAI's word for the kind of error, if it has one."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)


def status_body(message: str, status: int, param: str | None, code: str | None) -> dict[str, object]:
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": _TYPES.get(status, fallback), "param": param, "code": code}}


def has_anthropic_errors(path: str) -> bool:
    """Whether errors at `path` have Anthropic's shape."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def anthropic_body(message: str, status: int, request_id: str) -> dict[str, object]:
    """The shape has no place for the field that is to blame: `message` begins with its name."""
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, fallback), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
