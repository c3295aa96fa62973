"""One configured address of a router, with what is known of the worker behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import grpc

from common.types import WorkerLoad, WorkerRole, WorkerState
from protos.baton.v1 import worker_pb2
from router.fleet.endpoint import Endpoint


@dataclass(slots=True, frozen=True)
class Sent:
    at: float  # time.monotonic()
    num_tokens: int  # of the prompt, that the worker computes


@dataclass(slots=True)
class Worker:
    address: str
    role: WorkerRole
    channel: grpc.aio.Channel
    channel_version: int  # of the certificates that it shows
    info: worker_pb2.WorkerInfo | None = None
    parameters: frozenset[str] = frozenset()  # of sampling, that it knows
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: WorkerState = WorkerState.UNREACHABLE
    problem: str = ""
    lost_at: float = -math.inf  # time.monotonic() when it was last found to be gone after it had been ready
    sent: dict[object, Sent] = field(default_factory=dict)  # running requests that no report counts
    running: set[object] = field(default_factory=set)  # requests, reported or not

    def endpoint(self, excluded: str) -> Endpoint:
        info = self.info
        return Endpoint(
            worker_id=info.worker_id if info else "",
            role=self.role,
            address=self.address,
            epoch=info.epoch if info else "",
            fingerprint=info.fingerprint if info else "",
            block_size=info.block_size if info else 0,
            parameters=self.parameters,
            max_model_len=info.max_model_len if info else None,
            load=self.load,
            state=self.state,
            excluded=excluded,
            num_unreported=len(self.sent),
            num_unreported_tokens=sum(sent.num_tokens for sent in self.sent.values()),
        )
