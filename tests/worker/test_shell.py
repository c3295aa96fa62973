from __future__ import annotations

import pytest

from common.config import WorkerSettings
from common.types import WorkerRole
from worker.shell import worker_id

BY_EPOCH = "prefill-01234567"


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("0.0.0.0:50061", "10.0.0.5:50061", "prefill-10.0.0.5:50061"),
        ("127.0.0.1:50061", "prefill-0.prefill:50061", "prefill-prefill-0.prefill:50061"),
        ("10.0.0.5:50061", None, "prefill-10.0.0.5:50061"),
        ("[fd00::5]:50061", None, "prefill-[fd00::5]:50061"),
        ("10.0.0.5:0", None, BY_EPOCH),
        ("0.0.0.0:50061", None, BY_EPOCH),
        ("[::]:50061", None, BY_EPOCH),
        ("127.0.0.1:50061", None, BY_EPOCH),
        ("localhost:50061", None, BY_EPOCH),
        ("unix:/run/baton.sock", None, BY_EPOCH),
    ],
)
def test_a_worker_keeps_its_id_where_its_address_is_its_own(listen: str, advertise: str | None, expected: str) -> None:
    settings = WorkerSettings(listen=listen, advertise=advertise)
    assert worker_id(settings, WorkerRole.PREFILL, "0123456789abcdef") == expected
