from __future__ import annotations

import pytest

from kv_store.base import ConnectorConfig, KVConnector
from tests.kv_store.conformance import ConnectorConformance, Create

pytest.importorskip("nixl_cu13", reason="NIXL is not installed (extra 'nixl')")


class TestNixl(ConnectorConformance):
    @pytest.fixture(params=[False, True], ids=["plain", "checksums"])
    def create(self, request: pytest.FixtureRequest) -> Create:
        from kv_store.nixl import NixlConnector

        def create(worker_id: str, epoch: str) -> KVConnector:
            return NixlConnector(
                ConnectorConfig(
                    worker_id=worker_id,
                    epoch=epoch,
                    verify_checksums=bool(request.param),
                    transfer_timeout_s=5.0,
                )
            )

        return create
