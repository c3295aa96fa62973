"""From a call that failed to the error of `common.errors` that it stands for."""

from __future__ import annotations

import grpc

from common.errors import BatonError, InternalError, UnavailableError
from common.grpc.status import error_of_call


class CancelledError(BatonError):
    """The request was cancelled, by `Answer.cancel` or with the client."""

    grpc_code = "CANCELLED"
    http_status = 499


def to_baton_error(error: grpc.RpcError, router: str) -> BatonError:
    """The error of `common.errors` that a failed call stands for."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError(str(error))
    code, message = error.code(), error.details() or error.code().name
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            if tls_problem := _tls_problem(message, router):
                return UnavailableError(tls_problem)
            if any(sign in message for sign in ("failed to connect", "DNS resolution failed", "Connection refused")):
                return UnavailableError(f"no router answers at {router} (`baton up` starts a stack)")
        case grpc.StatusCode.CANCELLED:
            return CancelledError(message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"what answers at {router} is not a Baton router: {message}")
    return error_of_call(code.name, message, error.trailing_metadata())


def _tls_problem(message: str, router: str) -> str:
    """What gRPC's words for a connection that did not come about mean; empty if TLS is not the reason."""
    if not message.startswith("failed to connect"):
        return ""
    if "handshake failed" in message or "verification check failed" in message:
        return f"TLS with {router} failed: {message.partition('last error: ')[2]}"
    if "Socket closed" in message:
        return f"{router} hangs up: it wants TLS (--tls-ca), or a client's certificate (--tls-cert) that it trusts"
    return ""
