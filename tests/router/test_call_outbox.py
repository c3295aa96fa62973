"""What goes into one message to a worker: as much as waits, and no more than a message may have."""

from __future__ import annotations

from protos.baton.v1 import decode_pb2
from router.fleet.decode_stream import BATCH_BYTES, MAX_IDS, CallOutbox

NUM_BYTES = 1000


def request_of(num_bytes: int = NUM_BYTES) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(request_id="x" * num_bytes)


def outbox_of(*sizes: int, takes_batches: bool = True) -> CallOutbox:
    """With starts of so many bytes, numbered from 1 on."""
    outbox = CallOutbox()
    outbox.takes_batches = takes_batches
    for call_id, num_bytes in enumerate(sizes, 1):
        outbox.start(call_id, request_of(num_bytes), num_bytes, deadline=100.0)
    return outbox


def messages_of(outbox: CallOutbox) -> list[decode_pb2.DecodeManyRequest]:
    messages = []
    while outbox:
        messages.append(outbox.next_message(now=0.0))
    return messages


def starts_of(outbox: CallOutbox) -> list[list[int]]:
    return [[start.call_id for start in message.starts] for message in messages_of(outbox)]


def test_what_waits_goes_together() -> None:
    outbox = outbox_of(5, 6)
    outbox.forget(70, cancel=True)
    outbox.credit(71, 10)
    outbox.credit(71, 5)
    (message,) = messages_of(outbox)
    assert [start.call_id for start in message.starts] == [1, 2]
    assert message.starts[1].request == request_of(6)
    assert list(message.cancelled_call_ids) == [70]
    assert [(credit.call_id, credit.num_bytes) for credit in message.credits] == [(71, 15)]


def test_a_start_has_what_is_left_of_its_time() -> None:
    outbox = outbox_of(1, 1)
    outbox.start(3, request_of(), NUM_BYTES, deadline=12.5)
    message = outbox.next_message(now=12.0)
    assert [start.timeout_s for start in message.starts] == [88.0, 88.0, 0.5]
    late = outbox_of(1)
    assert late.next_message(now=101.0).starts[0].timeout_s == 0.0


def test_a_batch_is_bounded() -> None:
    outbox = outbox_of(*[NUM_BYTES] * 200)
    messages = messages_of(outbox)
    assert [start.call_id for message in messages for start in message.starts] == [*range(1, 201)]
    assert all(message.ByteSize() <= BATCH_BYTES for message in messages)
    assert len(messages) == 4


def test_a_large_start_goes_alone() -> None:
    assert starts_of(outbox_of(10, BATCH_BYTES, 10, 10)) == [[1], [2], [3, 4]]
    outbox = outbox_of(BATCH_BYTES)
    outbox.forget(9, cancel=True)
    assert starts_of(outbox) == [[], [1]], "not even with what was cancelled: a worker ends the stream for too much"


def test_an_older_worker_gets_one_start_in_a_message() -> None:
    assert starts_of(outbox_of(1, 1, 1, takes_batches=False)) == [[1], [2], [3]]
    outbox = outbox_of(1, takes_batches=False)
    outbox.credit(9, 1)
    assert starts_of(outbox) == [[], [1]]


def test_cancels_and_credits_are_bounded() -> None:
    outbox, largest = CallOutbox(), 2**40
    for number in range(2 * MAX_IDS):
        outbox.forget(largest + number, cancel=True)
        outbox.credit(number + 2 * largest, 2**31)
    messages = messages_of(outbox)
    assert [one for message in messages for one in message.cancelled_call_ids] == [
        *range(largest, largest + 2 * MAX_IDS)
    ]
    assert [credit.call_id for message in messages for credit in message.credits] == [
        *range(2 * largest, 2 * largest + 2 * MAX_IDS)
    ]
    assert max(message.ByteSize() for message in messages) < 2**18 - BATCH_BYTES


def test_what_is_forgotten_is_not_told_of() -> None:
    outbox = outbox_of(1, 1)
    outbox.forget(1, cancel=True)
    outbox.credit(3, 5)
    outbox.forget(3, cancel=False)
    (message,) = messages_of(outbox)
    assert [start.call_id for start in message.starts] == [2]
    assert not message.cancelled_call_ids
    assert not message.credits
