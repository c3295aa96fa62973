"""What is found of a loop that works for long in one turn, and of one that has much to do in short turns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.abuse.conftest import STALL_CPU_S
from tests.abuse.stalls import Loop, Stalls

SERVER = """
import asyncio
import sys
import time

import grpc
from grpc_health.v1 import health_pb2_grpc

from common.grpc.health import SERVING, Health


def work(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def work_as_told() -> None:
    work(float(sys.stdin.readline()))
    print("done", flush=True)


async def main() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    health = Health()
    health.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await server.start()
    asyncio.get_running_loop().add_reader(sys.stdin, work_as_told)
    print(port, flush=True)
    while True:
        work(0.002)
        await asyncio.sleep(0)


asyncio.run(main())
"""
HELD = 5 * 10**7  # numbers that are added up in one call, which holds the interpreter lock for a second or so


class Server:
    """Its loop is never idle; its turns are short, unless it is told to work for longer in one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.loop = Loop("server", process.pid, f"127.0.0.1:{int(self._stdout.readline())}")

    def work(self, cpu_s: float) -> None:
        print(cpu_s, file=self._stdin, flush=True)
        assert self._stdout.readline() == "done\n"


@contextmanager
def running_server() -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def test_a_turn_of_a_second_is_found() -> None:
    with running_server() as server:
        stalls = Stalls([server.loop])
        with stalls.watching():
            for _ in range(3):  # one may be nearly over when the next question comes
                server.work(1.0)
    assert stalls.found_s["server"][0] > STALL_CPU_S


def test_short_turns_are_no_stall_while_the_tests_themselves_are_busy() -> None:
    with running_server() as server:
        stalls = Stalls([server.loop])
        with stalls.watching():
            assert sum(range(HELD)) > 0
    assert stalls.found_s["server"][0] <= STALL_CPU_S
