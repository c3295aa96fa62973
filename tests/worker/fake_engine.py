"""An engine process without a model or torch, for tests of its front: `python -m tests.worker.fake_engine`.

The first token of a prompt says what becomes of the request; see `ANSWER` and its neighbours.
"""

from __future__ import annotations

import sys
import threading

import msgspec
import zmq

from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad
from engine import messages as m
from engine.process import Bootstrap, _exit_with_parent
from tests.worker.words import ANSWER, BLOCK_SIZE, FLOOD, GARBAGE, REMOTE, VOCAB_SIZE, WAIT

SPEC = KVCacheSpec(model_id="fake", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")


class Engine:
    def __init__(self) -> None:
        bootstrap = msgspec.json.decode(sys.stdin.readline(), type=Bootstrap)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(bootstrap.address)
        self._seen: list[str] = []

    def run(self) -> None:
        self._send(
            m.EngineReady(
                spec=SPEC,
                is_read_from_memory=False,
                num_blocks=64,
                max_model_len=200_000,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=[VOCAB_SIZE - 1],
                dtype_reason="",
                device="cpu",
                device_reason="",
                peer=b"",
            )
        )
        while True:
            if not self._socket.poll(500):
                self._send(m.Alive())
                continue
            for command in m.decode_commands(self._socket.recv()):
                self._handle(command)

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.AddRequest():
                self._add(command)
            case m.BlocksAnnounced() | m.RemoteFirstToken() | m.RemotePrefillFailed():
                self._seen.append(type(command).__name__)
                if isinstance(command, m.RemotePrefillFailed):
                    self._send(m.PrefillReceived(command.request_id, 0.0), _answer(command.request_id, command.reason))
            case m.Release():
                self._seen.append("Release")
            case m.GetStatus(call_id):
                seen, self._seen = self._seen, []
                self._send(m.Status(call_id, WorkerLoad(num_blocks=64), ",".join(seen) or "ok"))

    def _add(self, command: m.AddRequest) -> None:
        match command.prompt_token_ids[0]:
            case int(word) if word == ANSWER:
                self._send(_answer(command.request_id))
            case int(word) if word == REMOTE:
                self._send(m.RemotePrefillNeeded(command.request_id, 0))
            case int(word) if word == FLOOD:
                for _ in range(20):
                    tokens = [SampledToken(7)] * 500
                    self._send(*[m.TokensGenerated(request_id=command.request_id, tokens=tokens)] * 250)
            case int(word) if word == GARBAGE:
                self._socket.send(b"no message of ours")
            case int(word) if word == WAIT:
                pass

    def _send(self, *events: m.Event) -> None:
        self._socket.send(m.encode(events))


def _answer(request_id: str, fallback_reason: str = "") -> m.TokensGenerated:
    return m.TokensGenerated(
        request_id=request_id,
        tokens=[SampledToken(7)],
        finish_reason=FinishReason.LENGTH,
        fallback_reason=fallback_reason,
    )


if __name__ == "__main__":
    Engine().run()
