"""A tenant that asks for far more than its limit gets its limit, and costs the tenants beside it nothing.

None of it depends on how fast the machine is: the noisy tenant's limit is so low that most of what it asks for is too
much, however long that takes. What the quiet tenant notices of it in time, `bench.noisy_tenant` measures.
"""

from __future__ import annotations

import math

from bench.tenant_load import TenantClient
from router.limits.quotas import BURST_S
from tests.abuse.conftest import NOISY_KEY, NOISY_REQUESTS_PER_SECOND, QUIET_TENANT_KEY
from tests.abuse.rude import Target

NUM_NOISY = 400
NOISY_RATE = 20 * NOISY_REQUESTS_PER_SECOND
MAX_TOKENS = 4


def test_a_tenant_at_20_times_its_limit(target: Target) -> None:
    noisy = TenantClient(target.grpc, target.http, NOISY_KEY, rate=NOISY_RATE, max_tokens=MAX_TOKENS, num=NUM_NOISY)
    quiet = None
    try:
        quiet = TenantClient(target.grpc, target.http, QUIET_TENANT_KEY, rate=4.0, max_tokens=MAX_TOKENS)
        of_noisy = noisy.ended(waits=True)
        of_quiet = quiet.ended()
    finally:
        for client in (noisy, quiet):
            if client is not None:
                client.kill()
    assert {one.status for one in of_quiet.requests} == {"OK"}
    assert len(of_quiet.requests) >= 2, "one over each interface while the other tenant asks"

    most = NOISY_REQUESTS_PER_SECOND * (of_noisy.elapsed_s + BURST_S)
    assert 1 <= len(of_noisy.answered) <= most
    assert len(of_noisy.requests) == NUM_NOISY
    assert len(of_noisy.answered) + len(of_noisy.refused) == NUM_NOISY, "nothing else came of any"
    assert {(one.interface, one.status) for one in of_noisy.refused} == {
        ("rest", "429"), ("grpc", "RESOURCE_EXHAUSTED"),
    }  # fmt: skip
    longest_s = math.ceil(1 / NOISY_REQUESTS_PER_SECOND)  # until one more may come; Retry-After has whole seconds
    assert all(one.retry_after_s is not None and 0 < one.retry_after_s <= longest_s for one in of_noisy.refused)
