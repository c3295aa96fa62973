"""The connectors that a worker's settings name."""

from __future__ import annotations

from common.config import WorkerSettings
from kv_store.base import ConnectorConfig, KVConnector
from kv_store.registry import create_connector, create_store


def create_connectors(
    settings: WorkerSettings, *, epoch: str, worker_id: str, num_ranks: int = 1
) -> tuple[KVConnector, KVConnector | None]:
    """The one that hands prompts over, and the store beside it, if there is one. `settings`: of any class; single
    connectors' settings are its extras in an engine's process, and fields of the command's class. Raises as
    `create_connector`."""
    config = ConnectorConfig(
        epoch=epoch,
        worker_id=worker_id,
        transfer_timeout_s=settings.transfer_timeout_s,
        verify_checksums=settings.verify_checksums,
        section={name: value for name, value in settings if name not in WorkerSettings.model_fields},
    )
    connector = create_connector(settings.connector, config, num_ranks)
    return connector, create_store(settings.connector, settings.store, config, num_ranks)
