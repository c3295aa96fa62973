from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from common.errors import TransferError
from kv_store.base import ConnectorConfig, FetchBlock, KVConnector, LocalBlock
from kv_store.memory import MemoryConnector
from tests.kv_store.blocks import name_of
from tests.kv_store.conformance import ConnectorConformance, Create, Worker


class TestMemory(ConnectorConformance):
    takes_turns = False

    @pytest.fixture(params=[False, True], ids=["plain", "checksums"])
    def create(self, request: pytest.FixtureRequest) -> Create:
        def create(worker_id: str, epoch: str) -> KVConnector:
            return MemoryConnector(
                ConnectorConfig(worker_id=worker_id, epoch=epoch, verify_checksums=bool(request.param))
            )

        return create

    def test_a_released_block_is_not_read(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        job_id = producer.publish([LocalBlock(0, 3, name_of(1))])
        (published,) = producer.results()
        assert published.ref is not None
        producer.connector.release(job_id)
        before = consumer.bytes_of(5)
        consumer.fetch([FetchBlock(published.ref, 5)])
        (result,) = consumer.results()
        assert result.error is not None
        assert "lease" in result.error
        assert consumer.bytes_of(5) == before

    def test_a_block_published_twice_is_readable_until_the_last_release(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        first = producer.publish([LocalBlock(0, 3, name_of(1))])
        producer.publish([LocalBlock(0, 3, name_of(1))])
        refs = [result.ref for result in producer.results()]
        producer.connector.release(first)
        consumer.fetch([FetchBlock(ref, 5) for ref in refs[:1] if ref])
        assert [result.error for result in consumer.results()] == [None]

    def test_changed_bytes_fail_the_checksum(self, workers: Callable[..., Worker], create: Create) -> None:
        producer, consumer = workers("producer"), workers("consumer")
        consumer.connector.add_peer(producer.connector.describe())
        (ref,) = producer.published({3: name_of(1)})
        producer.fill(3, 0x11)
        consumer.fetch([FetchBlock(ref, 5)])
        (result,) = consumer.results()
        assert bool(result.error) == bool(ref.checksums)

    def test_another_process_is_no_peer(self, workers: Callable[..., Worker]) -> None:
        producer, consumer = workers("producer"), workers("consumer")
        description = producer.connector.describe()
        producer.connector.close()
        with pytest.raises(TransferError, match="producer"):
            consumer.connector.add_peer(description)

    def test_the_description_of_a_former_life_is_no_peer(self, workers: Callable[..., Worker]) -> None:
        producer, consumer = workers("producer"), workers("consumer")
        description = producer.connector.describe()
        producer.connector.close()
        workers("producer", epoch="e2")
        with pytest.raises(TransferError, match="e1"):
            consumer.connector.add_peer(description)

    def test_a_reference_to_another_hash_fails(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        (ref,) = producer.published({3: name_of(1)})
        consumer.fetch([FetchBlock(msgspec.structs.replace(ref, block_hash=name_of(2)), 5)])
        assert [bool(result.error) for result in consumer.results()] == [True]
