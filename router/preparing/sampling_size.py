"""Whether sampling parameters are small enough for a worker's message."""

from __future__ import annotations

from functools import partial

from common.errors import InvalidArgumentError
from common.grpc.options import SAMPLING_BYTES
from common.sampling import FieldName, SamplingParams
from protos.baton.v1 import types_pb2
from protos.messages import message_of


def check_size(params: SamplingParams, name: FieldName, field: str = "") -> None:
    """Workers take no larger parameters. `field`: what has just made them larger; else the largest one is to blame."""
    message = message_of(params, types_pb2.SamplingParams)
    if message.ByteSize() <= SAMPLING_BYTES:
        return
    field = field or max((one.name for one, _ in message.ListFields()), key=partial(_size, message))
    raise InvalidArgumentError(
        name(field),
        f"is too large: the sampling parameters take {message.ByteSize()} bytes on their way to a worker, and "
        f"{SAMPLING_BYTES} are the most",
    )


def _size(message: types_pb2.SamplingParams, field: str) -> int:
    others = types_pb2.SamplingParams()
    others.CopyFrom(message)
    others.ClearField(field)  # type: ignore[arg-type]
    return message.ByteSize() - others.ByteSize()
