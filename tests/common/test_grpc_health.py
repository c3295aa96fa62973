"""Health checks, whoever watches."""

from __future__ import annotations

from unittest.mock import AsyncMock

import grpc
import pytest
from grpc_health.v1 import health_pb2

from common.grpc.health import MAX_WATCHERS, NOT_SERVING, SERVING, Health

REQUEST = health_pb2.HealthCheckRequest()


class AbortedError(Exception):
    pass


async def test_watchers_leave_room_for_checks() -> None:
    health = Health()
    health.set("", SERVING)
    context = AsyncMock()
    context.abort.side_effect = AbortedError
    watchers = [health.Watch(REQUEST, context) for _ in range(MAX_WATCHERS)]
    for watcher in watchers:
        assert (await anext(watcher)).status == SERVING
    with pytest.raises(AbortedError):
        await anext(health.Watch(REQUEST, context))
    assert context.abort.call_args.args[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await health.Check(REQUEST, context)).status == SERVING
    for watcher in watchers:
        await watcher.aclose()
    another = health.Watch(REQUEST, context)
    assert (await anext(another)).status == SERVING
    await another.aclose()


async def test_a_check_is_told_what_is_true_now() -> None:
    health = Health()
    health.set("", SERVING)
    health.renew = lambda: health.set("", NOT_SERVING)
    assert (await health.Check(REQUEST, AsyncMock())).status == NOT_SERVING
    health.renew = lambda: health.set("", SERVING)
    assert (await health.List(health_pb2.HealthListRequest(), AsyncMock())).statuses[""].status == SERVING
