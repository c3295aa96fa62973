"""Between messages and dataclasses, both ways."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import msgspec
import pytest

from baton.client.report import RequestReport, Timings, Usage
from common.sampling import SamplingParams
from common.types import WorkerLoad, WorkerState
from kv_store.base import BlockRef
from protos.baton.v1 import types_pb2, worker_pb2
from protos.convert import state_to_proto
from protos.messages import given_fields, message_of, value_of


def test_what_is_given_is_what_is_set() -> None:
    params = types_pb2.SamplingParams(temperature=0.0, stop=["a", "b"], logit_bias={5: -1.0})
    assert given_fields(params) == {"temperature": 0.0, "stop": ("a", "b"), "logit_bias": {5: -1.0}}
    assert given_fields(types_pb2.RequestReport(timings=types_pb2.Timings(queue_ms=1))) == {"timings": {"queue_ms": 1}}


def test_there_and_back() -> None:
    for value, message_class in (
        (SamplingParams(stop=("a",), stop_token_ids=(1, 2), logprobs=0, logit_bias={7: 0.5}), types_pb2.SamplingParams),
        (RequestReport(timings=Timings(queue_ms=1.5), num_retries=2, fallback_reason="x"), types_pb2.RequestReport),
        (
            BlockRef(
                index=3, block_hash=b"\xff" * 16, peer="p", epoch="e", block_id=4, checksums=(1, 2), staged_slots=(0,)
            ),
            types_pb2.BlockRef,
        ),
    ):
        assert value_of(message_of(value, message_class), type(value)) == value


def test_none_is_unset() -> None:
    assert not message_of(SamplingParams(logprobs=None), types_pb2.SamplingParams).HasField("logprobs")
    assert message_of(SamplingParams(logprobs=0), types_pb2.SamplingParams).HasField("logprobs")


def test_a_field_that_one_side_lacks_stays_at_its_default() -> None:
    load = WorkerLoad(num_blocks=9, num_unstored_blocks=4)
    message = message_of(load, worker_pb2.WorkerLoad, state=state_to_proto(WorkerState.READY), epoch="e")
    assert (message.num_blocks, message.epoch) == (9, "e")
    assert value_of(message, WorkerLoad) == WorkerLoad(num_blocks=9)


def test_a_list_is_a_tuple() -> None:
    load = WorkerLoad(num_queued_prompts=2, queued_by_slack=(0, 5, 5))
    message = message_of(load, worker_pb2.WorkerLoad)
    assert list(message.queued_by_slack) == [0, 5, 5]
    assert value_of(message, WorkerLoad) == load


def test_an_enum_is_its_word() -> None:
    message = worker_pb2.WorkerLoad(state=worker_pb2.WORKER_STATE_UNREACHABLE)
    assert given_fields(message) == {"state": WorkerState.UNREACHABLE}


def test_python_users_have_every_field_of_the_report() -> None:
    for message_class, value_class in (
        (types_pb2.RequestReport, RequestReport),
        (types_pb2.Timings, Timings),
        (types_pb2.Usage, Usage),
    ):
        assert set(message_class.DESCRIPTOR.fields_by_name) == {field.name for field in fields(value_class)}


def test_threads_bring_a_new_class_to_msgspec_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec crashes if it meets the same new class on two threads at once."""

    @dataclass(frozen=True)
    class Told:
        integrity: str = ""

    num_ended_before: list[int] = []  # of each call, when it begins
    ended: list[Told] = []
    convert = msgspec.convert

    def watched(given: dict[str, object], value_class: type[Told]) -> Told:
        num_ended_before.append(len(ended))
        time.sleep(0.02)
        ended.append(convert(given, value_class))
        return ended[-1]

    monkeypatch.setattr(msgspec, "convert", watched)
    status, begin = worker_pb2.WorkerStatus(integrity="ok"), threading.Barrier(4)

    def look(_number: int) -> Told:
        begin.wait()
        return value_of(status, Told)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(4))) == [Told("ok")] * 4
    assert num_ended_before.count(0) == 1
