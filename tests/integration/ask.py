"""Asks a service for many cases at once, and compares with what transformers answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from baton.client.report import Result
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import Service

Salt = Callable[[], str]


def ask(
    service: Service, expected: Mapping[str, Expected], names: Iterable[str], salt: Salt, *, at_once: int = 64
) -> dict[str, Result]:
    """Greedy answers by the name of their case, over gRPC by token ids; all equal to what is expected."""
    with service.client() as client, ThreadPoolExecutor(at_once) as pool:
        futures = {
            name: pool.submit(
                lambda name: client.generate(
                    expected[name].prompt_token_ids,
                    temperature=0.0,
                    max_tokens=BY_NAME[name].max_tokens,
                    cache_salt=salt(),
                    request_id=name,
                ).result(),
                name,
            )
            for name in names
        }
        results = {name: future.result() for name, future in futures.items()}
    check(results, expected)
    return results


def check(results: Mapping[str, Result], expected: Mapping[str, Expected]) -> None:
    wrong = {name: why for name, result in results.items() if (why := expected[name].explain(result.token_ids))}
    assert not wrong
