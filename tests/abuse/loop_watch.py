"""How much an event loop works while one small question waits for its answer.

    python -m tests.abuse.loop_watch PID PLACE

Asks the process PID for its health, over REST if PLACE is a URL and over gRPC if it is an address, until the standard
input ends. Prints `ready` after the first answer, and in the end a line of JSON: for each question, the CPU time in
seconds that the main thread of PID, which runs its loop, took until the answer.

A process of its own: a thread beside others of Python waits for its turn with the answer in hand, and whatever the loop
does for others meanwhile would count.
"""

from __future__ import annotations

import json
import select
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PATIENCE_S = 60.0
PAUSE_S = 0.02


def cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def asker(place: str) -> Callable[[], object]:
    if place.startswith("http://"):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return lambda: opener.open(f"{place}/health", timeout=PATIENCE_S).read()
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]))
    return lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)


def main(pid: int, place: str) -> None:
    ask = asker(place)
    ask()
    print("ready", flush=True)
    found = []
    is_last = False
    while not is_last:  # one more question after the end, so that there is one
        is_last = bool(select.select([sys.stdin], [], [], PAUSE_S)[0])
        before = cpu_s(pid)
        ask()
        found.append(cpu_s(pid) - before)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
