"""Queries to a router as a whole, which each of its processes answers for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ProcessQuery(Generic[T]):
    name: str
    kind: type[T]  # of each thing that is told: a dataclass
    tell: Callable[[int, str | None, str], list[T]]  # a limit, whose they have to be, and which one if not all
