"""One real fleet for all: a router that asks for keys, one prefill and one decode worker of a tiny random model. Each
test is rude to it, while a quiet client with a key of its own is served."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from baton.stack.stack_plan import free_ports
from bench.quiet import QuietClient
from tests.abuse.rude import RUDE_KEY, Target
from tests.abuse.stalls import Stalls, loops_of
from tests.abuse.vitals import Vitals
from tests.chaos.tiny_model import write_tiny_model
from tests.faults.disk import Disk
from tests.integration.stack import RUNNING, ClientOptions, Fleet, running

QUIET_KEY = "quiet" * 8
QUIET_TENANT_KEY, NOISY_KEY = "calm-" * 8, "noisy" * 8  # of tenants
NOISY_REQUESTS_PER_SECOND = 1.0
ABUSE_SECONDS = float(os.environ.get("ABUSE_SECONDS", "600"))
ABUSE_CANCELS = int(os.environ.get("ABUSE_CANCELS", "10000"))
REST_S = 4.0
# Of a loop, until one small question is answered. That is 10 to 30 ms beside the fuzzers of the protos and 130 ms
# beside the largest bodies, on a core that twenty processes share, too; the rest is for slower machines. Work that
# grows with a message and that nothing bounds takes longer.
STALL_CPU_S = 0.5
GROWTH_MIB = 64.0
"""What a process may hold more after a test: what was there at once at most, which malloc does not give back. What is
left each time again is found by doing it again (`Vitals.until_at_rest`). A test may take more by
`@pytest.mark.growth_mib`, and says why."""


class Guarded(Fleet):
    client_options = ClientOptions(api_key=QUIET_KEY)
    keys_file: Path
    picker: str


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """The fleet's store has it for itself."""
    disk = Disk(tmp_path_factory.mktemp("store") / "kv", megabytes=256)
    yield disk
    disk.close()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, disk: Disk) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "kv").symlink_to(disk.path)
    write_tiny_model(folder / "model")
    keys = folder / "keys"
    keys.write_text(
        f"{QUIET_KEY} name=quiet\n{RUDE_KEY} name=rude\n"
        f"{QUIET_TENANT_KEY} name=calm tenant=quiet\n{NOISY_KEY} name=noisy tenant=noisy\n"
    )
    limits = folder / "limits.yaml"
    limits.write_text(f"tenants: {{noisy: {{requests_per_second: {NOISY_REQUESTS_PER_SECOND}}}}}\n")
    [port] = free_ports(1)
    guarded = Guarded(
        folder,
        f"--model={folder / 'model'}",
        "--num-blocks=2048",
        "--kv-dir-size-gb=0.2",
        prefill=1,
        decode=1,
        router_flags=(
            f"--api-keys-file={keys}",
            f"--limits-file={limits}",
            "--receive-timeout=3",
            "--request-timeout=60",
            "--min-remote-tokens=1",
            f"--endpoint-picker-listen=127.0.0.1:{port}",
        ),
    )
    guarded.keys_file, guarded.picker = keys, f"127.0.0.1:{port}"
    with running(guarded):
        quiet = QuietClient(guarded.grpc, guarded.http, QUIET_KEY)  # what the first requests make is there from now on
        assert not quiet.stop().failures
        rest(guarded)
        yield guarded


def rest(fleet: Fleet) -> None:
    """Waits until no process takes more memory: engines have theirs filled in a while after they began to serve."""
    vitals = Vitals(fleet)
    rested_at = time.monotonic() + REST_S
    while time.monotonic() < rested_at:
        time.sleep(0.5)
        if any(mib > 1 for mib in vitals.growth_mib().values()):
            vitals, rested_at = Vitals(fleet), time.monotonic() + REST_S


@pytest.fixture
def target(fleet: Guarded) -> Target:
    return Target.of(fleet, fleet.picker)


@pytest.fixture(autouse=True)
def vitals(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Vitals]:
    """Around each test: a quiet client is served, and the fleet is afterwards as it was before."""
    before = Vitals(fleet)
    quiet = QuietClient(fleet.grpc, fleet.http, QUIET_KEY)
    yield before
    answers = quiet.stop()
    assert not answers.failures, answers.failures
    assert all(answers.latencies_s.values())
    marker = request.node.get_closest_marker("growth_mib")
    before.check(GROWTH_MIB if marker is None else marker.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300 + ABUSE_SECONDS + ABUSE_CANCELS / 10))


@pytest.fixture
def unstalled(fleet: Fleet) -> Iterator[None]:
    """Around a test whose requests are small for a router and for workers, whatever they hold."""
    stalls = Stalls(loops_of(fleet))
    with stalls.watching():
        yield
    longest_s = {name: found[:5] for name, found in stalls.found_s.items()}
    assert all(found[0] <= STALL_CPU_S for found in longest_s.values()), longest_s


@pytest.fixture
def fuzz_seconds() -> float:
    """Of one fuzzer, however many ports it asks."""
    return ABUSE_SECONDS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"log of {type(fleet).__name__} at {fleet.grpc}", fleet.logs()) for fleet in RUNNING]
    return report
