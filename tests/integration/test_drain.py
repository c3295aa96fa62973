"""SIGTERM to one worker of several: what it runs ends well, there or elsewhere."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from common.errors import UnavailableError
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.chaos.tiny_model import random_prompt
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.stack import CALL_TIMEOUT_S, START_TIMEOUT_S, Fleet, Member, engines, running, wait_for
from tests.integration.tiny import Case, make_cases, tiny_fleet

pytestmark = pytest.mark.timeout(600)

DRAIN_TIMEOUT_S = 6.0
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = (f"--drain-timeout={DRAIN_TIMEOUT_S:g}", "--engine-timeout=100", "--chunk-size=16")
    fleet = tiny_fleet(tmp_path_factory.mktemp("fleet"), *flags, prefill=2, decode=2)
    with running(fleet):
        yield fleet


@pytest.fixture(scope="module")
def cases(fleet: Fleet) -> list[Case]:
    return make_cases(fleet, 800)


def busiest(fleet: Fleet, workers: Sequence[Member]) -> tuple[Member, float]:
    """The one of the stopped `workers` with most streams, and their number, once the router has what they sent."""
    seen: list[list[float]] = []

    def settled() -> bool:
        samples = watch.scrape(f"{fleet.http}/metrics")
        seen.append([watch.total(samples, "baton_router_endpoint_requests", address=one.address) for one in workers])
        return bool(samples) and len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

    wait_for("the router has all that came before the stop", settled)
    num, index = max((num, index) for index, num in enumerate(seen[-1]))
    return workers[index], num


def test_streams_that_will_not_end_in_time_are_handed_over(fleet: Fleet, cases: list[Case], salt: Salt) -> None:
    """Those of the other worker go on as they were; each answer is what it is without a drain."""
    with fleet.client() as client, ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        answers = [
            client.generate(
                cases[number % 2].prompt, cache_salt=salt(), request_id=f"long-{number}", **cases[number % 2].options
            )
            for number in range(NUM_STREAMS)
        ]
        for answer in answers:
            next(iter(answer))
        results = [pool.submit(answer.result) for answer in answers]
        workers = [member for member in fleet.members if member.role == "decode"]
        for worker in workers:
            os.kill(engine_of(worker), signal.SIGSTOP)
        victim, num_there = busiest(fleet, workers)  # whose streams will not end in time, however fast the machine is
        for worker in workers:
            if worker is not victim:
                os.kill(engine_of(worker), signal.SIGCONT)
        victim.process.popen.send_signal(signal.SIGTERM)
        code = victim.process.popen.wait(START_TIMEOUT_S)
        log = victim.process.log.read_text()
        fleet.replace(victim)
        done = [result.result() for result in results]
    for number, result in enumerate(done):
        assert result.token_ids == cases[number % 2].answer, f"long-{number}: {result.report}"
        assert result.report.num_retries == 0
    moved = [result for result in done if result.report.num_handovers]
    assert len(moved) == num_there > 0
    assert {result.report.num_migrations for result in moved} == {1}
    assert victim.address not in {result.report.decode_worker for result in moved}
    assert code == 0, log
    router_log = fleet.router.log.read_text()
    for result in moved:
        (line,) = (line for line in router_log.splitlines() if "handing over" in line and result.request_id in line)
        assert victim.address in line


def test_a_handed_over_stream_finds_its_blocks_in_the_store(fleet: Fleet, salt: Salt) -> None:
    """The prompt, computed once, is not computed again."""
    prompt = random_prompt(random.Random(5), 1600)
    with fleet.client() as client:
        answer = client.generate(prompt, temperature=0.0, max_tokens=2000, ignore_eos=True, cache_salt=salt())
        next(iter(answer))
        victim = fleet.busy("decode")
        os.kill(engine_of(victim), signal.SIGSTOP)  # it will not end in time
        victim.process.popen.send_signal(signal.SIGTERM)
        result = answer.result()
        assert victim.process.popen.wait(START_TIMEOUT_S) == 0
    fleet.replace(victim)
    assert (result.report.num_migrations, result.report.num_handovers) == (1, 1)
    assert result.usage.cached_tokens >= 1584


def test_a_stream_that_nobody_takes_over_is_cut_at_the_end_and_said_so(fleet: Fleet, salt: Salt) -> None:
    first, second = (member for member in fleet.members if member.role == "decode")
    with fleet.client() as client, ThreadPoolExecutor(1) as pool:
        first.process.popen.send_signal(signal.SIGTERM)  # idle, so it ends at once
        assert first.process.popen.wait(START_TIMEOUT_S) == 0
        answer = client.generate(
            random_prompt(random.Random(6), 50),
            temperature=0.0,
            max_tokens=300,
            ignore_eos=True,
            cache_salt=salt(),
            request_id="nobody-else",
        )
        next(iter(answer))
        os.kill(engine_of(second), signal.SIGSTOP)
        result = pool.submit(answer.result)
        second.process.popen.send_signal(signal.SIGTERM)
        assert second.process.popen.wait(START_TIMEOUT_S) == 1
        with pytest.raises(UnavailableError, match="no decode worker"):
            result.result()
    fleet.restart(first)
    fleet.restart(second)
    wait_for("every worker is ready", fleet.all_ready, START_TIMEOUT_S)
    (line,) = (line for line in second.process.log.read_text().splitlines() if "stream cut" in line)
    assert "nobody-else" in line


def test_a_draining_prefill_worker_finishes_what_it_took_and_refuses_the_rest(fleet: Fleet, salt: Salt) -> None:
    """Its engine is stopped for a moment, so that a prompt is in its hands while it drains."""
    first, second = (member for member in fleet.members if member.role == "prefill")
    decode = next(member for member in fleet.members if member.role == "decode")
    prompt = random_prompt(random.Random(8), 3000)
    with held_in_prefill(fleet, first, decode, prompt, salt()) as taken:
        with grpc.insecure_channel(first.address) as channel:
            worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(timeout_s=CALL_TIMEOUT_S))
        wait_for("it drains", lambda: "draining" in first.process.log.read_text(), CALL_TIMEOUT_S)
        refused = ask_directly(decode, prompt[:500], salt(), [first.address, second.address])
    done = taken.result()
    assert first.process.popen.wait(START_TIMEOUT_S) == 0
    fleet.replace(first)
    assert (refused.prefill_worker, refused.num_retries, refused.fallback_reason) == (second.address, 1, "")
    assert (done.prefill_worker, done.num_retries, done.fallback_reason) == (first.address, 0, "")


def ask_directly(decode: Member, prompt: list[int], salt: str, prefill: list[str]) -> types_pb2.RequestReport:
    """One request to a decode worker, with the prefill workers named; what it says at the end."""
    with grpc.insecure_channel(decode.address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(
            decode_pb2.DecodeRequest(
                request_id="direct",
                prompt_token_ids=prompt,
                sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=5, seed=1, ignore_eos=True),
                cache_salt=salt,
                prefill_addresses=prefill,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        *_, last = call
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    report: types_pb2.RequestReport = last.report
    return report


@contextmanager
def held_in_prefill(
    fleet: Fleet, prefill: Member, decode: Member, prompt: list[int], salt: str
) -> Iterator[Future[types_pb2.RequestReport]]:
    """The request of a decode worker whose first blocks have come: the prefill worker's engine is stopped until the
    block ends."""
    num_files = count_files(fleet)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(ask_directly, decode, prompt, salt, [prefill.address])
        wait_for("the first blocks are handed over", lambda: count_files(fleet) > num_files, CALL_TIMEOUT_S)
        engine = engine_of(prefill)
        os.kill(engine, signal.SIGSTOP)
        try:
            yield taken
        finally:
            os.kill(engine, signal.SIGCONT)


def count_files(fleet: Fleet) -> int:
    return sum(1 for path in fleet.kv_dir.rglob("*") if path.is_file())


def engine_of(member: Member) -> int:
    (engine,) = engines(member.process.popen.pid)
    return engine
