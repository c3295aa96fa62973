"""What rude clients need: where to go, many calls at once, and which answers are right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.integration.stack import Fleet

T = TypeVar("T")
MIB = 2**20
RUDE_KEY = "rude-" * 8
PATIENCE_S = 60.0
OUR_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""What no client may ever see, whatever it sends."""
RESET = "Stream removed (RST_STREAM"
"""How the words begin that a client's gRPC library makes itself if a stream is reset; most resets become INTERNAL. At a
call's deadline both ends end it, and the reset may be what the client sees first."""
DEADLINE_SLACK_S = 0.5
MAX_WORDS = 300  # of a status, in what a failed test says
CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(slots=True, frozen=True)
class Target:
    grpc: str
    http: str
    prefill: str  # addresses of the workers' ports
    decode: str
    picker: str  # of the router, for its proxy

    @classmethod
    def of(cls, fleet: Fleet, picker: str) -> Target:
        (prefill, decode) = fleet.members
        return cls(fleet.grpc, fleet.http, prefill.address, decode.address, picker)

    @contextmanager
    def http_client(self, key: str | None = RUDE_KEY) -> Iterator[httpx.Client]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(
            base_url=self.http, headers=headers, limits=limits, timeout=PATIENCE_S, trust_env=False
        ) as client:
            yield client

    def host_port(self, address: str | None = None) -> tuple[str, int]:
        """Of an address; of the HTTP port if None."""
        host, _, port = (address or self.http.removeprefix("http://")).rpartition(":")
        return host, int(port)


@contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    """A connection of its own."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.insecure_channel(address, options=options) as opened:
        yield opened


def metadata(key: str | None = RUDE_KEY) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", f"Bearer {key}"),)


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()


def retry_delay_s(error: grpc.Call) -> float | None:
    """The delay that a refusal comes with; None if it has none."""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            seconds: float = info.retry_delay.ToTimedelta().total_seconds()
            return seconds
    return None


@dataclass(slots=True, frozen=True)
class Ending:
    """How a call ended, for its client."""

    code: grpc.StatusCode
    details: str = ""
    left_s: float = 0.0  # to its deadline

    @property
    def is_our_fault(self) -> bool:
        """False for a stream that was reset at the call's deadline: that status is of the client's own library."""
        is_made_here = self.details.startswith(RESET) and self.left_s <= DEADLINE_SLACK_S
        return self.code in OUR_FAULTS and not is_made_here

    def __str__(self) -> str:
        return f"{self.code.name}, {self.left_s:.1f} s before its deadline: {self.details[:MAX_WORDS]!r}"


def ending(
    opened: grpc.Channel, path: str, data: Iterable[bytes], *, key: str | None = RUDE_KEY, timeout_s: float = 30.0
) -> Ending:
    """Sends raw messages and reads the answer to its end."""
    method = opened.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
    deadline = time.monotonic() + timeout_s
    try:
        for _ in method(iter(data), timeout=timeout_s, metadata=metadata(key)):
            pass
    except grpc.RpcError as error:
        left_s = max(0.0, deadline - time.monotonic())
        return Ending(code_of(error), error.details() or "", left_s)
    return Ending(grpc.StatusCode.OK)


def call(
    opened: grpc.Channel, path: str, data: Iterable[bytes], *, key: str | None = RUDE_KEY, timeout_s: float = 30.0
) -> grpc.StatusCode:
    """The code of `ending`."""
    return ending(opened, path, data, key=key, timeout_s=timeout_s).code


def at_once(number: int, ask: Callable[[int], T], at_a_time: int = 32) -> Counter[T]:
    """Asks for 0, 1, …; how often each outcome came."""
    with ThreadPoolExecutor(at_a_time) as pool:
        return Counter(pool.map(ask, range(number)))
