"""One model on two hosts: here two addresses of this machine, and threads or processes in place of hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in torch's own documentation

from common.config import WorkerSettings
from common.errors import ConfigError, LostRankError, StartupError
from common.model_files import model_identity, open_model
from common.types import SampledToken
from common.version import VERSION
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.connectors import create_connectors
from engine.device import Device
from engine.hosts import handshake, member
from engine.hosts.beats import Beats
from engine.hosts.device import HostsDevice
from engine.hosts.gathering import join
from engine.hosts.group import HostGroup
from engine.hosts.kv_messages import Open
from engine.hosts.launch import settings_of_rank
from engine.hosts.place import Place, host_index, place_of
from engine.local.device import LocalDevice
from engine.local.memory import weight_bytes
from engine.step import Draw, StepInput, StepRow
from kv_store.base import BlockRef, FetchBlock, KVConnector, LocalBlock, TransferResult
from kv_store.no_store import NoStore
from tests.engine.tiny_models import BLOCK_SIZE, FAMILIES, make_model
from tests.integration.stack import descendants
from tests.nixl import needs_nixl

SECRET = b"a secret of some length"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "shared_by_hosts")


def settings_of(**changes: object) -> WorkerSettings:
    values = {
        "model": "shared_by_hosts",
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 40,
        "max_model_len": 128,
        "num_threads": 1,
        "tensor_parallel_size": 2,
        "num_hosts": 2,
        **changes,
    }
    return WorkerSettings.model_validate(values)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def place(index: int, port: int, *, num_hosts: int = 2, secret: bytes = SECRET, timeout_s: float = 60.0) -> Place:
    return Place(num_hosts=num_hosts, index=index, host="127.0.0.1", port=port, timeout_s=timeout_s, secret=secret)


def rank_at(here: Place, model: Path, settings: WorkerSettings) -> int:
    return member.serve(here, settings, model, join(here, model_identity(model), lambda _: None))


@contextmanager
def on_hosts(model: Path, num_hosts: int, **changes: object) -> Iterator[tuple[HostsDevice, list[Future[int]]]]:
    """The ranks of other hosts are threads."""
    port, settings = free_port(), settings_of(num_hosts=num_hosts, tensor_parallel_size=num_hosts, **changes)
    places = [place(index, port, num_hosts=num_hosts) for index in range(num_hosts)]
    with ThreadPoolExecutor(num_hosts) as pool:
        others = [pool.submit(rank_at, here, model, settings) for here in places[1:]]
        device = HostsDevice(model, settings, places[0])
        try:
            yield device, others
        finally:
            device.close()


PROMPT = list(range(3, 40))


def greedy(device: Device, num_tokens: int = 12, *, num_computed: int = 0) -> list[int]:
    """A prompt, then token by token. `num_computed`: tokens of the prompt whose KV is there."""
    tokens, start, drawn = PROMPT[num_computed:], num_computed, []
    for index in range(num_tokens):
        row = StepRow(
            token_ids=tokens,
            num_computed_tokens=start,
            block_ids=list(range(8)),
            draw=Draw(index=index, temperature=0.0),
        )
        start += len(tokens)
        [token] = device.execute([row])
        assert isinstance(token, SampledToken)
        drawn.append(token.token_id)
        tokens = [token.token_id]
    return drawn


def test_tokens_are_those_of_one_rank(model: Path) -> None:
    alone = settings_of(tensor_parallel_size=1, num_hosts=1)
    expected = greedy(LocalDevice(model, alone))
    with on_hosts(model, 2) as (device, [other]):
        assert greedy(device) == expected
        assert (device.info.spec.num_kv_heads, device.info.spec.tp_size) == (2, 1)
    assert other.result(30) == 0, "the other rank ends with rank 0"


def test_a_host_needs_memory_for_its_own_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is left than all weights take, and than the caches of both hosts."""
    available = weight_bytes(open_model(model), 4) - 1
    spec = LocalDevice(model, settings_of(tensor_parallel_size=1, num_hosts=1)).info.spec
    num_blocks = int(0.75 * available // (spec.block_bytes // 2))  # of a rank, which has half of each
    monkeypatch.setattr("engine.local.memory.available_bytes", lambda: available)
    monkeypatch.setattr("engine.local.memory._CPU_RESERVE_BYTES", 0)
    with on_hosts(model, 2, num_blocks=num_blocks) as (device, _):
        assert device.info.num_blocks == num_blocks


class Moving:
    """A connector of a device."""

    def __init__(self, device: Device, connector: KVConnector) -> None:
        self.connector = connector
        self._woken = threading.Event()
        connector.register_shards([(plane.cache, plane.spec) for plane in device.planes()], self._woken.set)

    def results(self, num: int) -> list[TransferResult]:
        found: list[TransferResult] = []
        while len(found) < num:
            assert self._woken.wait(60)
            self._woken.clear()
            found += self.connector.poll()
        return found

    def publish_prompt(self) -> list[BlockRef]:
        """Its whole blocks."""
        self.connector.publish(1, [LocalBlock(index, index, bytes([index]) * 16) for index in range(2)])
        return [one.ref for one in self.results(2) if one.ref is not None]

    def fetch(self, refs: list[BlockRef]) -> None:
        self.connector.fetch(2, [FetchBlock(ref, ref.index) for ref in refs])
        assert [one.error for one in self.results(len(refs))] == [None] * len(refs)


@pytest.mark.parametrize("hosts_hand_over", [True, False])
def test_a_prompts_blocks_are_handed_over(model: Path, tmp_path: Path, hosts_hand_over: bool) -> None:
    """By two hosts to a worker of one rank, or the other way."""
    stored = {"connector": "shared_storage", "kv_dir": str(tmp_path)}
    alone = LocalDevice(model, settings_of(tensor_parallel_size=1, num_hosts=1))
    opening = Open(connector="shared_storage", store="", epoch="e", worker_id="w")
    with on_hosts(model, 2, **stored) as (hosts, _):
        of_hosts, of_one = (create_connectors(settings_of(**stored), epoch="e", worker_id=name)[0] for name in "hw")
        joined, store = hosts.open_connectors(opening, of_hosts, None)
        assert store is None
        of_group, of_alone = Moving(hosts, joined), Moving(alone, of_one)
        first, last = (hosts, alone) if hosts_hand_over else (alone, hosts)
        publishing, fetching = (of_group, of_alone) if hosts_hand_over else (of_alone, of_group)
        expected = greedy(first)
        refs = publishing.publish_prompt()
        assert [ref.index for ref in refs] == [0, 1]
        fetching.fetch(refs)
        assert greedy(last, num_computed=2 * BLOCK_SIZE) == expected
        for one in (joined, of_one):
            one.close()


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have three KV heads each, three ranks two."""
    heads: dict[str, object] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 48,
        "intermediate_size": 96,
    }
    return make_model(tmp_path_factory.mktemp("models") / "of_six_heads", heads)


def joined_nixl(hosts: HostsDevice, name: str) -> KVConnector:
    own, _ = create_connectors(settings_of(connector="nixl"), epoch=name, worker_id=name)
    joined, _ = hosts.open_connectors(Open(connector="nixl", store="", epoch=name, worker_id=name), own, None)
    return joined


@pytest.mark.slow
@needs_nixl
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_first", "num_last"), [(2, 3), (3, 2), (3, 3)])
def test_hosts_read_from_another_number_of_hosts(six_heads: Path, num_first: int, num_last: int) -> None:
    """Rank by rank, each the heads that it has."""
    alone = settings_of(tensor_parallel_size=1, num_hosts=1)
    expected = greedy(LocalDevice(six_heads, alone))
    with (
        on_hosts(six_heads, num_first, connector="nixl") as (first, _),
        on_hosts(six_heads, num_last, connector="nixl") as (last, _),
    ):
        producer, consumer = joined_nixl(first, "first"), joined_nixl(last, "last")
        of_first, of_last = Moving(first, producer), Moving(last, consumer)
        assert greedy(first) == expected
        refs = of_first.publish_prompt()
        assert len(refs) == 2
        consumer.add_peer(producer.describe())
        of_last.fetch(refs)
        assert greedy(last, num_computed=2 * BLOCK_SIZE) == expected
        for one in (consumer, producer):
            one.close()


def test_a_rank_with_another_connector_is_refused(model: Path, tmp_path: Path) -> None:
    with on_hosts(model, 2, connector="shared_storage", kv_dir=str(tmp_path)) as (hosts, _):
        opening = Open(connector="nixl", store="", epoch="e", worker_id="w")
        with pytest.raises(StartupError, match=r"^rank 1: --connector: is shared_storage here, but nixl for rank 0$"):
            hosts.open_connectors(opening, NoStore(), None)


@pytest.mark.parametrize(
    ("problem", "timeout_s", "words"),
    [
        ("rank 1 has ended", 60.0, r"^rank 1 has ended$"),
        ("", 0.1, r"cannot be reached within 0.1 s \(--ranks-timeout\)$"),
    ],
)
def test_hosts_that_do_not_find_each_other(problem: str, timeout_s: float, words: str) -> None:
    """Gloo itself would wait for minutes."""
    store = TCPStore("localhost", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with pytest.raises(LostRankError, match=words):
        HostGroup(store, 0, 2, "127.0.0.1", lambda: problem, timeout_s=timeout_s)
    [waiting] = [thread for thread in threading.enumerate() if thread.name == "gloo"]
    theirs = TCPStore("localhost", store.port, None, False, timedelta(seconds=60), wait_for_workers=False)
    HostGroup(theirs, 1, 2, "127.0.0.1", lambda: "", timeout_s=60.0)
    waiting.join(60)
    assert not waiting.is_alive()


def test_each_rank_carries_out_the_copies_of_a_step(model: Path) -> None:
    """The prompt's blocks go to host memory, and from there to other blocks, which the next token reads."""
    tokens, likeliest = list(range(3, 40)), Draw(index=0, temperature=0.0)
    prompt = StepRow(token_ids=tokens, num_computed_tokens=0, block_ids=list(range(8)))
    with on_hosts(model, 2, host_cache_gb=0.001) as (device, _):
        expected = greedy(device, 1)
        num_blocks = -(-len(tokens) // device.info.spec.block_size)
        device.execute([prompt])
        blocks = range(num_blocks)
        down = [BlockCopy(BlockCopyKind.SWAP_OUT, block, block + 1) for block in blocks]
        up = [BlockCopy(BlockCopyKind.SWAP_IN, block + 8, block + 1) for block in blocks]
        last = StepRow(
            token_ids=tokens[-1:],
            num_computed_tokens=len(tokens) - 1,
            block_ids=[block + 8 for block in blocks],
            draw=likeliest,
        )
        step = StepInput(number=device.next_number(), rows=[last], copies=[*down, *up])
        (token,) = device.end(device.begin(step)).tokens
        assert token is not None
        assert [token.token_id] == expected


class LateWork:
    """Ends just after a wait for it has timed out."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self._has_ended = False

    def is_completed(self) -> bool:
        return self._has_ended

    def wait(self, _timeout: timedelta) -> None:
        if not self._has_ended:
            self._has_ended = True
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_is_late_is_not_lost(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gloo:
        def allgather(self, *_: object) -> LateWork:
            return LateWork(fails=fails)

    monkeypatch.setattr(HostGroup, "_meet", lambda *_: Gloo())
    store = TCPStore("localhost", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    group = HostGroup(store, 0, 2, "127.0.0.1", lambda: "rank 1 has ended" if fails else "", timeout_s=1.0)
    if fails:
        with pytest.raises(LostRankError, match=r"^rank 1 has ended$"):
            group.all_gather(torch.ones(2))
    else:
        assert group.all_gather(torch.ones(2)).shape == (4,)


def handshake_of(*, model: str = "m", release: str = VERSION, **changes: Any) -> tuple[str, str]:
    """What rank 0, which has two hosts and the model `m`, and the other one make of it."""
    peer, purpose = replace(place(1, 1), **changes), handshake.Purpose.STEPS
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ask = partial(handshake.ask, theirs, peer, model, "run", purpose, release=release)
        asking = pool.submit(ask)
        said = ""
        try:
            handshake.take(ours, place(0, 1), "m")
        except handshake.RefusedError as refusal:
            said = str(refusal)
        error = asking.exception(30)
    return said, "" if error is None else str(error)


def test_a_peer_that_is_like_rank_0_is_taken() -> None:
    assert handshake_of() == ("", "")


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"secret": b"another secret that is long"}, "its secret is another one (--ranks-secret-file)"),
        ({"release": "0.0.1"}, f"it is of release 0.0.1, not {VERSION}"),
        ({"model": "n"}, "its model is n, not m (--model)"),
        ({"index": 2}, "rank 2 is none of the ranks 1 to 1 (--host-index)"),
        ({"num_hosts": 3}, "it was told of 3 hosts, not 2 (--num-hosts)"),
        ({"ranks_per_host": 2}, "it was told of 4 ranks, not 2 (--tensor-parallel-size)"),
    ],
)
def test_a_peer_that_differs_is_told_why(changes: dict[str, Any], refusal: str) -> None:
    ours, theirs = handshake_of(**changes)
    assert ours == refusal
    assert theirs.endswith(refusal)


def test_missing_ranks_are_named_and_so_is_the_last_refusal(model: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        stranger = place(1, port, secret=b"not the secret of them")
        refused = pool.submit(join, stranger, model_identity(model), print)
        words = r"rank 1 did not come within 1 s \(--ranks-timeout\); .*its secret is another one"
        with pytest.raises(StartupError, match=words):
            HostsDevice(model, settings_of(), place(0, port, timeout_s=1.0))
        with pytest.raises(StartupError, match="does not take this host as rank 1: its secret is another one"):
            refused.result(30)


def test_a_silent_peer_is_lost() -> None:
    ours, theirs = socket.socketpair()
    said, is_lost = list[str](), threading.Event()

    def lost(reason: str) -> None:
        said.append(reason)
        is_lost.set()

    with theirs:
        beats = Beats(ours, "rank 1", lost, silence_s=0.1)
        assert is_lost.wait(30)
        assert beats.problem.startswith("rank 1 has been silent for 0.1 s: ")
        assert said == [beats.problem]
        beats.close()


def test_a_peer_that_ends_as_intended_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    said, is_gone = list[str](), threading.Event()

    def gone(reason: str) -> None:
        said.append(reason)
        is_gone.set()

    beats, peer = Beats(ours, "rank 0", gone), Beats(theirs, "rank 1")
    peer.say_end()
    assert is_gone.wait(30)
    assert (said, beats.problem, beats.has_said_end) == ([""], "", True)
    beats.close()
    peer.close()


def test_a_pod_knows_its_place(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    settings = settings_of(ranks_secret_file=str(tmp_path / "secret"))
    pod = {"LWS_LEADER_ADDRESS": "w-0.w.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    assert host_index(settings, pod) == 1
    here = place_of(settings, pod)
    assert (here.index, here.host, here.port, here.secret) == (1, "w-0.w.default", 50065, SECRET)
    assert place_of(settings, {**pod, "LWS_WORKER_INDEX": "0"}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("changes", "environ", "words"),
    [
        ({}, {}, "--host-index: is needed"),
        ({"host_index": 2}, {}, "--host-index: is 2, but --num-hosts is 2"),
        ({"host_index": 1, "num_hosts": 1}, {}, "--host-index: is 1, but --num-hosts is 1"),
        ({"host_index": 1, "tensor_parallel_size": 3}, {}, "--num-hosts: is 2, but --tensor-parallel-size is 3"),
        ({"host_index": 1, "tensor_parallel_size": 1}, {}, "--num-hosts: is 2, but --tensor-parallel-size is 1"),
        ({"host_index": 1, "pipeline_parallel_size": 2}, {}, "--num-hosts: does not go with --pipeline-parallel-size"),
        ({"host_index": 1, "data_parallel_size": 2}, {}, "--num-hosts: does not go with --data-parallel-size"),
        ({"host_index": 1}, {"LWS_GROUP_SIZE": "3"}, "--num-hosts: is 2, but the group has 3 pods"),
        ({"host_index": 1}, {}, "--ranks-address: is needed"),
        ({"host_index": 1, "ranks_address": "a:1"}, {}, "--ranks-secret-file: is needed"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, object], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        place_of(settings_of(**changes), environ)


def test_ranks_of_a_host_are_neighbours(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    settings = settings_of(
        tensor_parallel_size=6,
        ranks_address="0.0.0.0:7",
        ranks_secret_file=str(tmp_path / "secret"),
        num_threads=9,
        cpu_cores=(0, 1, 2, 3, 4, 5),
    )
    places = [place_of(settings.model_copy(update={"host_index": index}), {}) for index in range(2)]
    ranks = [here.of_rank(number) for here in places for number in range(3)]
    assert [rank.rank for rank in ranks] == list(range(6))
    assert {rank.num_ranks for rank in ranks} == {6}
    assert places[0].host == "0.0.0.0"
    assert ranks[1].host == "127.0.0.1", "a rank of host 0 goes where it can connect to"
    shares = [settings_of_rank(settings, rank) for rank in ranks[3:]]
    assert [share.num_threads for share in shares] == [3, 3, 3]
    assert [share.cpu_cores for share in shares] == [(0, 1), (2, 3), (4, 5)]


RANK_0 = """
import sys, time
from pathlib import Path
from common.config import WorkerSettings
from engine.hosts.device import HostsDevice
device = HostsDevice(Path(sys.argv[2]), WorkerSettings.model_validate_json(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
device.close()
"""
RANK_1 = """
import sys
from pathlib import Path
from common.config import WorkerSettings
from engine.hosts.member import run
sys.exit(run(WorkerSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2])))
"""


@contextmanager
def rank_process(code: str, model: Path, settings: WorkerSettings, index: int) -> Iterator[subprocess.Popen[bytes]]:
    given = settings.model_copy(update={"host_index": index}).model_dump_json()
    command = [sys.executable, "-c", code, given, str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def meeting(tmp_path: Path) -> WorkerSettings:
    """Settings of both hosts, but for the host's index."""
    (tmp_path / "secret").write_bytes(SECRET)
    return settings_of(ranks_address=f"127.0.0.1:{free_port()}", ranks_secret_file=str(tmp_path / "secret"))


def compute_until(device: Device, give_up: float) -> None:
    while time.monotonic() < give_up:
        greedy(device, 1)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_device(model: Path, meeting: WorkerSettings, signum: signal.Signals) -> None:
    with rank_process(RANK_1, model, meeting, 1) as process:
        here = place(0, int(meeting.ranks_address.rpartition(":")[2]))
        device = HostsDevice(model, meeting, here)
        greedy(device, 2)
        os.kill(process.pid, signum)
        what = "has ended" if signum == signal.SIGKILL else "has been silent for 4 s"
        with pytest.raises(LostRankError, match=rf"^rank 1.* {what}"):
            compute_until(device, time.monotonic() + 60)
        device.close()


@pytest.mark.slow
@pytest.mark.parametrize(("is_killed", "code"), [(True, 1), (False, 0)])
def test_a_rank_ends_with_rank_0(model: Path, meeting: WorkerSettings, is_killed: bool, code: int) -> None:
    """Well, if rank 0 ends as intended."""
    with rank_process(RANK_0, model, meeting, 0) as rank_0, rank_process(RANK_1, model, meeting, 1) as rank_1:
        assert rank_0.stdin is not None
        assert rank_0.stdout is not None
        assert rank_0.stdout.readline() == b"ready\n"
        if is_killed:
            rank_0.kill()
        else:
            rank_0.stdin.write(b"\n")
            rank_0.stdin.close()
        assert rank_1.wait(30) == code


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, whose heads four ranks can share."""
    changes = {**FAMILIES["mixtral"], "sliding_window": None, "num_key_value_heads": 4}
    return make_model(tmp_path_factory.mktemp("models") / "of_four_ranks", changes)


@contextmanager
def two_hosts_of_two(model: Path, meeting: WorkerSettings, **changes: object) -> Iterator[HostsDevice]:
    """Host 0 is this process and one that it starts; host 1 is two processes."""
    settings = meeting.model_copy(update={"tensor_parallel_size": 4, **changes})
    with rank_process(RANK_1, model, settings, 1) as host_1:
        device = HostsDevice(model, settings.model_copy(update={"host_index": 0}))
        try:
            yield device
        finally:
            device.close()
        assert host_1.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("expert_parallel_size", [1, 4])
def test_two_ranks_on_each_of_two_hosts(
    four_heads: Path, meeting: WorkerSettings, tmp_path: Path, expert_parallel_size: int
) -> None:
    """The tokens of one rank; and KV that comes from one rank, and goes to it."""
    stored = {"connector": "shared_storage", "kv_dir": str(tmp_path)}
    alone = LocalDevice(four_heads, settings_of(tensor_parallel_size=1, num_hosts=1))
    expected = greedy(alone)
    changes = {**stored, "expert_parallel_size": expert_parallel_size}
    with two_hosts_of_two(four_heads, meeting, **changes) as hosts:
        assert [plane.spec.tp_rank for plane in hosts.planes()] == [0, 1, 2, 3]
        of_hosts, of_one = (create_connectors(settings_of(**stored), epoch="e", worker_id=name)[0] for name in "hw")
        joined, _ = hosts.open_connectors(
            Open(connector="shared_storage", store="", epoch="e", worker_id="h"), of_hosts, None
        )
        of_group, of_alone = Moving(hosts, joined), Moving(alone, of_one)
        of_group.fetch(of_alone.publish_prompt())
        assert greedy(hosts, num_computed=2 * BLOCK_SIZE) == expected
        assert greedy(hosts) == expected
        for one in (joined, of_one):
            one.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_further_rank_that_is_lost_ends_the_device(four_heads: Path, meeting: WorkerSettings) -> None:
    """Its host goes with it."""
    settings = meeting.model_copy(update={"tensor_parallel_size": 4})
    with rank_process(RANK_1, four_heads, settings, 1) as host_1:
        device = HostsDevice(four_heads, settings.model_copy(update={"host_index": 0}))
        greedy(device, 2)
        [further] = descendants(host_1.pid)
        os.kill(further, signal.SIGKILL)
        with pytest.raises(LostRankError, match=r"^rank [23] .*has ended"):
            compute_until(device, time.monotonic() + 60)
        assert host_1.wait(60) == 1, "by itself: rank 0 has not said that it ends"
        device.close()


def test_a_further_rank_that_cannot_start_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    settings = settings_of(tensor_parallel_size=4)
    here = replace(place(0, free_port()), ranks_per_host=2)
    with pytest.raises(StartupError, match=r"^rank 1 \(a process of this host\) has ended with code 1: "):
        HostsDevice(model, settings, here)
