"""From the parts of a worker's profile to the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from baton.client.report import Profile
from protos.baton.v1 import router_pb2, worker_pb2


def profile_message(address: str, num_steps: int, timeout_s: float) -> router_pb2.ProfileWorkerRequest:
    return router_pb2.ProfileWorkerRequest(
        address=address, profile=worker_pb2.ProfileRequest(num_steps=num_steps, timeout_s=timeout_s)
    )


def profile_of(parts: Iterable[worker_pb2.ProfilePart]) -> Profile:
    files, last = defaultdict[str, bytearray](bytearray), worker_pb2.ProfilePart()
    for part in parts:
        if part.content:
            files[part.file] += part.content
        else:
            last = part
    return Profile(
        files={name: bytes(content) for name, content in files.items()},
        num_steps=last.num_steps,
        seconds=last.seconds,
        notes=tuple(last.notes),
    )
