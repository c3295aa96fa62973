"""An engine without a model, for measuring what is in front of it: a worker's front starts it as its own.

A request gets its first token at once. Then all requests get one more in each step, in one message.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable

import msgspec
import zmq

from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad
from engine import messages as m
from engine.process import ALIVE_INTERVAL_S, Bootstrap

STEP_VARIABLE = "BENCH_STEP_MS"  # of the environment: milliseconds from one step to the next
NUM_BLOCKS = 2**20
SPEC = KVCacheSpec(model_id="instant", num_layers=1, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
_READY = m.EngineReady(
    spec=SPEC, is_read_from_memory=True, num_blocks=NUM_BLOCKS, max_model_len=2**17, vocab_size=2**15,
    eos_token_ids=[0], dtype_reason="", device="cpu", device_reason="", peer=b"instant",
)  # fmt: skip
_LOAD = m.LoadChanged(WorkerLoad(num_blocks=NUM_BLOCKS, num_free_blocks=NUM_BLOCKS))


def serve(socket: zmq.Socket[bytes], step_ms: int) -> None:
    num_left: dict[str, int] = {}  # tokens, by request

    def give(request_ids: Iterable[str]) -> None:
        events: list[m.Event] = [m.Alive()]
        for request_id in request_ids:
            num_left[request_id] -= 1
            end = None if num_left[request_id] else FinishReason.LENGTH
            events.append(m.TokensGenerated(request_id=request_id, tokens=[SampledToken(7)], finish_reason=end))
            if end:
                del num_left[request_id]
        socket.send(m.encode(events))

    first: list[m.Event] = [_READY, _LOAD]
    socket.send(m.encode(first))
    while True:
        if not socket.poll(step_ms if num_left else int(ALIVE_INTERVAL_S * 500)):
            give(list(num_left))
            continue
        commands = m.decode_commands(socket.recv())
        added = {one.request_id: one.sampling_params.max_tokens for one in commands if isinstance(one, m.AddRequest)}
        num_left.update(added)
        give(added)
        for one in commands:
            if isinstance(one, m.Release):
                num_left.pop(one.request_id, None)
            elif isinstance(one, m.GetStatus):
                status: list[m.Event] = [m.Status(one.call_id, _LOAD.load, "ok")]
                socket.send(m.encode(status))


def _end_with_front() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    bootstrap = msgspec.json.decode(sys.stdin.readline(), type=Bootstrap)
    threading.Thread(target=_end_with_front, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(bootstrap.address)
    serve(socket, int(os.environ[STEP_VARIABLE]))


if __name__ == "__main__":
    main()
