"""Files and batches, as OpenAI's API tells of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from router.limits.clients import ApiClient


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # its file is not one of requests
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


@dataclass(slots=True, frozen=True, kw_only=True)
class StoredFile:
    file_id: str
    owner: str  # `ApiClient.owner`: who sees it
    name: str
    purpose: str  # "batch", or "batch_output" if it was made here
    num_bytes: int
    created_at: int  # this and all times: seconds since 1970

    def told(self) -> dict[str, object]:
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(slots=True, frozen=True)
class LineError:
    """Why a batch's file is not one of requests."""

    message: str
    line: int | None = None  # the first is 1
    param: str | None = None
    code: str = "invalid_request"

    def told(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "line": self.line, "param": self.param}


@dataclass(slots=True, frozen=True, kw_only=True)
class Batch:
    batch_id: str
    client: ApiClient  # whose requests they are
    endpoint: str
    input_file_id: str
    completion_window_s: int
    metadata: dict[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    created_at: int
    times: dict[str, int] = field(default_factory=dict)  # when it became what, by `BatchStatus`

    @property
    def expires_at(self) -> int:
        return self.created_at + self.completion_window_s

    def told(self) -> dict[str, object]:
        errors = {"object": "list", "data": [error.told() for error in self.errors]} if self.errors else None
        became = {f"{status}_at": self.times.get(status) for status in BatchStatus if status != BatchStatus.VALIDATING}
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": f"{self.completion_window_s // 3600}h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **became,
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


@dataclass(slots=True, frozen=True)
class BatchLine:
    """One request of a batch."""

    batch_id: str
    number: int  # the first is 1
    custom_id: str
    body: bytes  # JSON


@dataclass(slots=True, frozen=True)
class LineAnswer:
    status: int  # of HTTP
    request_id: str
    body: bytes  # JSON

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300
