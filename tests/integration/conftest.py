"""Stacks that many tests share, and what must hold after each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model, package_is_installed
from tests.integration import reference
from tests.integration.reference import Expected
from tests.integration.stack import RUNNING, Stack, running


@pytest.fixture(scope="session")
def model_dir() -> Path:
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    return ensure_model(DEFAULT_MODEL, default_cache_dir(), print)


@pytest.fixture(scope="session")
def expected(model_dir: Path) -> dict[str, Expected]:
    """What transformers answers to each case. Kept beside the model, for every checkout."""
    return reference.load(model_dir, Path(default_cache_dir()) / "test-references")


@pytest.fixture(scope="session")
def two(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker: the stack that most tests use. The shortest prompts are handed over, too."""
    stack = Stack(tmp_path_factory.mktemp("two"), "--min-remote-tokens=1")
    with running(stack):
        yield stack


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> Callable[[], str]:
    """A cache salt that no other request has, so that nothing is found in a prefix cache."""
    numbers = itertools.count()
    return lambda: f"{request.node.name}/{next(numbers)}"[-200:]


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """After each test, no worker of any stack holds a request, a lease or a block that is not cached."""
    yield
    for stack in RUNNING:
        stack.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"log of {type(stack).__name__} at {stack.grpc}", stack.logs()) for stack in RUNNING]
    return report
