"""Processes that stay for many tests, each a rank of groups over Gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from engine.ranks.group import GlooGroup, RankGroup

LONGEST_WAIT_S = 60.0
_FORK = multiprocessing.get_context("fork")  # importing torch takes longer than all that a test does

P = ParamSpec("P")
R = TypeVar("R")


class RankProcesses:
    """A context manager. Forked, so that they have what the caller imported."""

    def __init__(self, most: int, folder: Path) -> None:
        """`most` ranks; `folder` is theirs, to meet in."""
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(most):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(target=_serve, args=(theirs, rank, folder), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, job: Callable[Concatenate[RankGroup, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """What `job(group, *args)` returns on each of `size` ranks; a function of a module. Raises what the first rank
        that fails raised, with the text of its traceback."""
        for pipe in self._pipes[:size]:
            pipe.send((size, job, args, kwargs))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(2 * LONGEST_WAIT_S):
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pipe.recv())
        for rank, (is_fine, answer) in enumerate(answers):
            if not is_fine:
                error, text = answer
                error.add_note(f"on rank {rank} of {size}:\n{text}")
                raise error
        return [answer for _, answer in answers]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)  # a later process keeps the ends of earlier pipes open, so closing them says nothing
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    groups: dict[int, GlooGroup] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = pipe.recv()
            if asked is None:
                return
            size, job, args, kwargs = asked
            try:
                if size not in groups:
                    store = PrefixStore(f"of {size}", FileStore(str(folder / f"store-{size}"), size))
                    groups[size] = GlooGroup(store, rank, size, longest_wait_s=LONGEST_WAIT_S)
                answer = True, job(groups[size], *args, **kwargs)
            except Exception as error:
                answer = False, (error, traceback.format_exc())
            pipe.send(answer)


@dataclass(slots=True)
class CountingGroup:
    """A group that notes what it was asked for: the name, the tensor's shape and dtype; of an all-to-all the rows that
    go to others."""

    group: RankGroup
    asked: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def num_here(self) -> int:
        return self.group.num_here

    @property
    def over_network(self) -> bool:
        return self.group.over_network

    def all_reduce(self, values: torch.Tensor) -> None:
        assert values.is_contiguous()
        self.asked.append(("all_reduce", tuple(values.shape), values.dtype))
        self.group.all_reduce(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        self.asked.append(("all_gather", tuple(values.shape), values.dtype))
        return self.group.all_gather(values)

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        assert sum(counts) == len(rows)
        self.asked.append(("all_to_all", (sum(counts) - counts[self.rank], rows.shape[1]), rows.dtype))
        return self.group.all_to_all(rows, counts, num_from)


@dataclass(slots=True)
class Nobody:
    """A place among ranks that are not there, for what asks nothing of them."""

    rank: int
    size: int
    num_here: int = 1
    over_network: bool = False

    def all_reduce(self, values: torch.Tensor) -> None:
        raise AssertionError("an all-reduce")

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an all-gather")

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        raise AssertionError("an all-to-all")
