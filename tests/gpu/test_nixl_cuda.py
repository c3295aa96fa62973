"""KV blocks between the caches of two processes on one CUDA device, read in place and through host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from common.errors import StartupError  # noqa: E402
from kv_store.base import FetchBlock  # noqa: E402
from tests.kv_store.conformance import Worker, random_cache  # noqa: E402
from tests.kv_store.peer_process import BIG_SPEC, PeerProcess, make_worker, seed_of  # noqa: E402
from tests.nixl import needs_nixl  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    needs_nixl,
    pytest.mark.timeout(300),
]

NUM_BLOCKS = 16


def check_fetch(peer: PeerProcess, consumer: Worker) -> None:
    """All blocks of the peer, in reverse, compared with what its seed says."""
    published = peer.published()
    consumer.connector.add_peer(published.peer)
    consumer.fetch([FetchBlock(ref, NUM_BLOCKS - 1 - ref.index) for ref in published.refs])
    assert {result.error for result in consumer.results()} == {None}
    expected = random_cache(NUM_BLOCKS, BIG_SPEC, seed_of("e1")).flip(0)
    assert torch.equal(consumer.cache.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture
def made() -> Iterator[list[PeerProcess | Worker]]:
    made: list[PeerProcess | Worker] = []
    yield made
    for one in made:
        (one if isinstance(one, PeerProcess) else one.connector).close()


@pytest.mark.parametrize("consumer_staging", ["never", "always"])
@pytest.mark.parametrize("producer_staging", ["never", "always"])
def test_vram_to_vram(made: list[PeerProcess | Worker], producer_staging: str, consumer_staging: str) -> None:
    peer = PeerProcess("serve", str(NUM_BLOCKS), "e1", "cuda", producer_staging)
    consumer = make_worker("consumer", NUM_BLOCKS, device="cuda", staging=consumer_staging)
    made += [peer, consumer]
    check_fetch(peer, consumer)


@pytest.mark.parametrize(("producer", "consumer"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_between_device_and_host(made: list[PeerProcess | Worker], producer: str, consumer: str) -> None:
    """Staged on the device's side: that needs nothing of the other end's transports."""
    peer = PeerProcess("serve", str(NUM_BLOCKS), "e1", producer, "always" if producer == "cuda" else "auto")
    worker = make_worker("consumer", NUM_BLOCKS, device=consumer, staging="always" if consumer == "cuda" else "auto")
    made += [peer, worker]
    check_fetch(peer, worker)


def test_transports_without_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL 1.5 does so itself on a machine with a GPU, whatever memory is to be moved."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(StartupError, match="NIXL cannot start"):
        make_worker("consumer", NUM_BLOCKS, device="cuda", staging="auto")
