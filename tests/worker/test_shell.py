from __future__ import annotations

import pytest

from common.config import WorkerSettings
from common.errors import BatonError, InternalError, InvalidArgumentError, OverloadedError, UnavailableError
from common.types import WorkerRole
from engine.messages import RequestFailed
from worker.shell import error_from, worker_id

BY_EPOCH = "prefill-01234567"


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("0.0.0.0:50061", "10.0.0.5:50061", "prefill-10.0.0.5:50061"),
        ("127.0.0.1:50061", "prefill-0.prefill:50061", "prefill-prefill-0.prefill:50061"),
        ("0.0.0.0:50061", "fd00::5:50061", "prefill-[fd00::5]:50061"),  # the chart's $(POD_IP):50061
        ("0.0.0.0:50061", "[fd00::5]:50061", "prefill-[fd00::5]:50061"),
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
def test_a_worker_keeps_its_id_if_its_address_is_its_own(listen: str, advertise: str | None, expected: str) -> None:
    settings = WorkerSettings(listen=listen, advertise=advertise)
    assert worker_id(settings, WorkerRole.PREFILL, "0123456789abcdef") == expected


@pytest.mark.parametrize("kind", [InvalidArgumentError, OverloadedError, UnavailableError, InternalError])
def test_what_the_engine_refuses_is_an_error_that_names_its_field(kind: type[BatonError]) -> None:
    error = error_from(RequestFailed("r", kind.grpc_code, "is wrong: very", "sampling_params.stop"))
    assert (type(error), error.reason) == (kind, "is wrong: very")
    if kind is InvalidArgumentError:
        assert (error.field, error.message) == ("sampling_params.stop", "sampling_params.stop: is wrong: very")
