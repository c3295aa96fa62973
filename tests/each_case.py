"""Many cases of one test that share its fixtures: a process, a router, a worker."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., Awaitable[None]]


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but fixtures are made once for all cases. A case that fails is named, and the
    others go on. Each finds a fake worker that was asked for nothing yet."""
    all_names = (names,) if isinstance(names, str) else names
    values = [(case,) if isinstance(names, str) else case for case in cases]

    def decorate(test: Test) -> Test:
        async def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, case in enumerate(values):
                if "worker" in fixtures:
                    fixtures["worker"].requests.clear()
                with subtests.test(f"{number}: {str(case)[:200]}"):
                    await test(**fixtures, **dict(zip(all_names, case, strict=True)))

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in all_names]
        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[subtests, *others])  # type: ignore[attr-defined]
        run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
        run.__module__ = test.__module__
        return run

    return decorate
