from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, KVConnector, LocalBlock
from kv_store.block_files import HEADER_BYTES, STALE_TEMP_S, BlockFiles
from kv_store.shared_storage import SharedStorageConnector
from tests.kv_store.conformance import SPEC, ConnectorConformance, Create, Worker, name_of

REPOSITORY = Path(__file__).parents[2]


def files_of(directory: Path, spec: KVCacheSpec = SPEC) -> BlockFiles:
    return BlockFiles(directory, spec)


class TestSharedStorage(ConnectorConformance):
    @pytest.fixture
    def kv_dir(self, tmp_path: Path) -> Path:
        return tmp_path / "kv"

    @pytest.fixture
    def create(self, kv_dir: Path) -> Create:
        def create(worker_id: str, epoch: str) -> KVConnector:
            return SharedStorageConnector(ConnectorConfig(kv_dir=str(kv_dir), worker_id=worker_id, epoch=epoch))

        return create

    def test_a_block_is_written_once(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        producer.publish([LocalBlock(0, 3, name_of(1))])
        assert [result.num_bytes for result in producer.results()] == [HEADER_BYTES + SPEC.block_bytes]
        consumer.publish([LocalBlock(0, 9, name_of(1))])
        (again,) = consumer.results()
        assert (again.error, again.num_bytes) == (None, 0)
        consumer.fetch([FetchBlock(BlockRef(index=0, block_hash=name_of(1)), 5)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(5) == producer.bytes_of(3)
        path = files_of(kv_dir).path(name_of(1))
        assert path == kv_dir / SPEC.fingerprint() / "00" / f"{name_of(1).hex()}.kv"
        assert path.stat().st_size == HEADER_BYTES + SPEC.block_bytes

    def test_blocks_outlive_all_workers(self, workers: Callable[..., Worker]) -> None:
        producer = workers("producer")
        producer.published({3: name_of(1)})
        producer.connector.close()
        later = workers("later", epoch="e2")
        assert later.connector.lookup([name_of(1), name_of(2)]) == 1
        later.fetch([FetchBlock(BlockRef(index=0, block_hash=name_of(1)), 5)])
        assert [result.error for result in later.results()] == [None]
        assert later.bytes_of(5) == producer.bytes_of(3)

    def test_shards_of_one_model_never_meet(self, workers: Callable[..., Worker]) -> None:
        first, second = (workers(f"w{rank}", spec=replace(SPEC, tp_size=2, tp_rank=rank)) for rank in (0, 1))
        first.published({3: name_of(1)})
        assert first.connector.lookup([name_of(1)]) == 1
        assert second.connector.lookup([name_of(1)]) == 0

    @pytest.mark.parametrize(
        ("offset", "what"),
        [
            (0, "version"),
            (8, "version"),
            (16, "another"),
            (24, "checksum"),
            (32, "another"),
            (48, "another"),
            (HEADER_BYTES, "checksum"),
            (HEADER_BYTES + SPEC.block_bytes - 1, "checksum"),
        ],
    )
    def test_a_flipped_bit_is_found_and_the_file_deleted(
        self, pair: tuple[Worker, Worker], kv_dir: Path, offset: int, what: str
    ) -> None:
        producer, consumer = pair
        refs = producer.published({3: name_of(1), 4: name_of(2)})
        path = files_of(kv_dir).path(name_of(1))
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        errors = {result.index: result.error for result in consumer.results()}
        assert errors[0] is not None
        assert what in errors[0]
        assert errors[1] is None
        assert not path.exists()
        # It can be written and read again.
        assert producer.published({3: name_of(1)})
        consumer.fetch([FetchBlock(refs[0], 0)])
        assert [result.error for result in consumer.results()] == [None]

    @pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + SPEC.block_bytes + 1])
    def test_a_file_of_the_wrong_size(self, pair: tuple[Worker, Worker], kv_dir: Path, size: int) -> None:
        producer, consumer = pair
        (ref,) = producer.published({3: name_of(1)})
        path = files_of(kv_dir).path(name_of(1))
        os.truncate(path, size)
        assert consumer.connector.lookup([name_of(1)]) == 0
        consumer.fetch([FetchBlock(ref, 1)])
        (result,) = consumer.results()
        assert result.error is not None
        assert f"{size} bytes" in result.error
        assert not path.exists()

    def test_another_blocks_file_under_this_name(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        ref, _ = producer.published({3: name_of(1), 4: name_of(2)})
        files = files_of(kv_dir)
        shutil.copy(files.path(name_of(2)), files.path(name_of(1)))
        consumer.fetch([FetchBlock(ref, 1)])
        (result,) = consumer.results()
        assert result.error is not None
        assert "another block" in result.error

    @pytest.mark.parametrize("wipe_all", [True, False], ids=["kv_dir", "content"])
    def test_a_wiped_directory(self, pair: tuple[Worker, Worker], kv_dir: Path, wipe_all: bool) -> None:
        producer, consumer = pair
        (lost,) = producer.published({3: name_of(1)})
        for directory in [kv_dir] if wipe_all else list(kv_dir.iterdir()):
            shutil.rmtree(directory)
        assert consumer.connector.lookup([name_of(1)]) == 0
        consumer.fetch([FetchBlock(lost, 1)])
        (result,) = consumer.results()
        assert result.error is not None
        assert "not in the store" in result.error
        (ref,) = producer.published({4: name_of(2)})
        consumer.fetch([FetchBlock(ref, 1)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(1) == producer.bytes_of(4)

    def test_a_directory_that_turns_unwritable(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        (ref,) = producer.published({3: name_of(1)})
        shutil.rmtree(kv_dir)
        kv_dir.write_text("a file where the directory was")
        producer.publish([LocalBlock(0, 4, name_of(2)), LocalBlock(1, 5, name_of(3))])
        assert all("cannot" in (result.error or "") for result in producer.results())
        consumer.fetch([FetchBlock(ref, 1)])
        assert [bool(result.error) for result in consumer.results()] == [True]
        kv_dir.unlink()
        assert producer.published({4: name_of(2)})

    def test_reads_not_begun_by_the_deadline_fail(self, workers: Callable[..., Worker], kv_dir: Path) -> None:
        producer = workers("producer")
        (ref,) = producer.published({3: name_of(1)})
        config = ConnectorConfig(kv_dir=str(kv_dir), transfer_timeout_s=0.0)
        late = Worker(SharedStorageConnector(config), 4)
        before = late.bytes_of(1)
        late.fetch([FetchBlock(ref, 1)])
        (result,) = late.results()
        late.connector.close()
        assert result.error is not None
        assert "not read within 0.0 s" in result.error
        assert late.bytes_of(1) == before

    def test_stale_temporary_files_are_deleted_at_start(self, workers: Callable[..., Worker], kv_dir: Path) -> None:
        temp_dir = files_of(kv_dir).temp_dir
        temp_dir.mkdir(parents=True)
        stale, young = temp_dir / "stale", temp_dir / "young"
        for path in (stale, young):
            path.write_bytes(b"half a block")
        long_ago = time.time() - 2 * STALE_TEMP_S
        os.utime(stale, (long_ago, long_ago))
        worker = workers("worker")
        worker.published({3: name_of(1)})
        worker.connector.close()  # waits for the thread that cleans up
        assert [path.name for path in temp_dir.iterdir()] == ["young"]


class TestStart:
    def test_no_directory_given(self) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: "):
            SharedStorageConnector(ConnectorConfig())

    def test_missing_parent(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: .*No such file"):
            SharedStorageConnector(ConnectorConfig(kv_dir=str(tmp_path / "missing" / "kv")))

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "kv").write_text("")
        with pytest.raises(StartupError, match=r"^kv_dir: .*exists"):
            SharedStorageConnector(ConnectorConfig(kv_dir=str(tmp_path / "kv")))

    @pytest.fixture
    def read_only_dir(self) -> Iterator[Path]:
        """Not under `tmp_path`, whose parents only their owner may enter."""
        directory = Path(tempfile.mkdtemp(prefix="baton-read-only-"))
        directory.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)  # permissions don't bind root
        yield directory
        if is_root:
            os.seteuid(0)
        directory.rmdir()

    def test_read_only(self, read_only_dir: Path) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: cannot write to .*Permission denied"):
            SharedStorageConnector(ConnectorConfig(kv_dir=str(read_only_dir)))


def run_writer(kv_dir: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs `body` in a process of its own, with `files`, `name_of`, `data` (one block) and `half` (of its size)."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from tests.kv_store.conformance import SPEC, name_of
from kv_store.block_files import BlockFiles
from common.errors import TransferError
files = BlockFiles(Path({str(kv_dir)!r}), SPEC)
data = memoryview(bytes(range(256)) * (SPEC.block_bytes // 256))
half = SPEC.block_bytes // 2
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{body}
"""
    return subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_a_full_disk_fails_the_block_and_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit ends the write half-way, as a full disk does."""
    done = run_writer(
        tmp_path,
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (half, resource.RLIM_INFINITY))
try:
    files.write(name_of(1), data)
except TransferError as error:
    print(error.message)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(files.write(name_of(2), data))
""",
    )
    assert done.returncode == 0, done.stderr
    message, num_bytes = done.stdout.splitlines()
    assert message.startswith("cannot write ")
    assert message.endswith("File too large")
    assert int(num_bytes) == HEADER_BYTES + SPEC.block_bytes
    files = files_of(tmp_path)
    assert not files.contains(name_of(1))
    assert list(files.temp_dir.iterdir()) == []


def test_a_killed_writer_leaves_nothing_readable(tmp_path: Path) -> None:
    """The kernel kills the writer inside its write, with half of the block in the file."""
    done = run_writer(
        tmp_path,
        """
files.write(name_of(1), data)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (half, resource.RLIM_INFINITY))
files.write(name_of(2), data)
""",
    )
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    files = files_of(tmp_path)
    (left,) = files.temp_dir.iterdir()
    assert left.stat().st_size == SPEC.block_bytes // 2
    buffer = memoryview(bytearray(SPEC.block_bytes))
    files.read(name_of(1), buffer)
    assert bytes(buffer) == bytes(range(256)) * 3
    assert not files.contains(name_of(2))
    with pytest.raises(TransferError, match="not in the store"):
        files.read(name_of(2), buffer)
    assert files.delete_stale_temps() == 0
    assert files.delete_stale_temps(older_than_s=-1.0) == 1
    assert files.write(name_of(2), buffer) == HEADER_BYTES + SPEC.block_bytes
