"""What waits for the garbage collector, which comes when it likes: memory that piles up until then."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest

from common.errors import BatonError

PACKAGES = ("common", "decode_service", "prefill_service", "router", "worker")
GRPC_KEEPS = ("handle", "handle_call", "abort")  # frames of an aborted call that grpcio keeps; these hold no request


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_left_out() -> None:
    """Import it: what was there before the module's tests is looked at once and not in each test."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def only_collected() -> Iterator[list[object]]:
    """What the collector alone finds, of what is made inside; complete afterwards."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def left_of_requests(found: list[object]) -> Counter[str]:
    """Frames of ours, errors that still hold some, and objects of ours, by name."""
    return Counter(name for one in found if (name := _name_of_ours(one)))


def _name_of_ours(one: object) -> str:
    if isinstance(one, FrameType):
        package = one.f_globals.get("__name__", "").partition(".")[0]
        name = one.f_code.co_name
        return name if package in PACKAGES and name not in GRPC_KEEPS else ""
    if isinstance(one, BatonError):
        return type(one).__name__ if one.__traceback__ is not None else ""
    return type(one).__name__ if type(one).__module__.partition(".")[0] in PACKAGES else ""
