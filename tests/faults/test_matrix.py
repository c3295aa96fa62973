"""Each cell of the matrix, with real processes: the moment is held, the fault happens, all is as the table says.

A few cells run in `make test-slow`; the others are marked `faults` (`make test-faults` runs all, or a sixth of them).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from kv_store.lmcache.client import RETRY_AFTER_S
from tests.faults import watch
from tests.faults.client_process import Ask, Told
from tests.faults.conftest import HASTY_TIMEOUT_S, NUM_RANKS, QUEUE_POLICY, ROLE_SHIFTS, Kind, Stage, Stages
from tests.faults.disk import corrupt
from tests.faults.harm import Harm, restart_whom_ucx_ended, revive
from tests.faults.matrix import (
    CELLS,
    CONNECTORS,
    RANKS,
    Cell,
    Counted,
    End,
    Fault,
    Moment,
    Outcome,
    Process,
    expected,
    heard_all_the_same,
)
from tests.faults.network import Cut
from tests.faults.reference import NUM_TOKENS
from tests.faults.scene import MAX_TRIES, MissedError, Scene
from tests.integration.stack import Member, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

NUM_PARTS = 6  # of the matrix: see `sixth`
SIXTH = int(os.environ.get("FAULTS_SIXTH", "0"))  # 1 to NUM_PARTS; 0: the whole matrix
FREE_WITHIN_S = 60.0  # keepalive, what leases are kept for, and a busy machine
LONG_ANSWER = 8_000  # tokens; lasts longer than keepalive takes to notice that a client or a router hangs
TIMEOUTS_S = (4.0, 9.0)  # of requests whose deadline is to pass; the next if the moment came too late

# While blocks are on their way, it matters how they travel; with memory-to-memory connectors, also who holds them.
P2P_MOMENTS = (Moment.BETWEEN_CHUNKS, Moment.MID_TRANSFER, Moment.AFTER_FIRST_TOKEN)
P2P_PROCESSES = (Process.PREFILL_FRONT, Process.PREFILL_ENGINE, Process.PREFILL_RANK)

LOGGED = {  # what a log line says, which names the request
    Counted.RETRY: "decode worker lost, retrying",
    Counted.PREFILL_RETRY: "prefill worker failed",
    Counted.FALLBACK: "remote KV did not arrive, computing it here",
    Counted.MIGRATION: "decode worker lost, migrating",
    Counted.CANCELLED: "cancelled",
    Counted.DEADLINE: "passed",  # the deadline; its name is a part of the request's id
}

QUICK = {
    Cell(Process.CLIENT, Moment.MID_CHUNK, Fault.CANCEL),
    Cell(Process.CLIENT, Moment.MID_TRANSFER, Fault.CANCEL),
    Cell(Process.CLIENT, Moment.QUEUED, Fault.DEADLINE),
    Cell(Process.STORE, Moment.MID_TRANSFER, Fault.CORRUPT_FILE),
    Cell(Process.STORE, Moment.BETWEEN_CHUNKS, Fault.FULL_DISK),
    Cell(Process.DECODE_FRONT, Moment.AFTER_FIRST_TOKEN, Fault.CUT),
    Cell(Process.PREFILL_ENGINE, Moment.BETWEEN_CHUNKS, Fault.SIGKILL),
}
# Likewise with `--queue-policy slo` and roles that move, which takes another fleet: whoever is killed is in mid-shift.
# (Ranks would take a third one: tests/integration/test_ranks.py kills some.)
QUICK_IN_MID_SHIFT = {
    Cell(Process.PREFILL_ENGINE, Moment.BETWEEN_CHUNKS, Fault.SIGKILL),
    Cell(Process.DECODE_FRONT, Moment.MID_DECODE, Fault.SIGKILL),
}


@dataclass(slots=True, frozen=True)
class Case:
    cell: Cell
    connector: str
    interface: str = "grpc"
    cut: Cut = Cut.BOTH
    queue_policy: str = QUEUE_POLICY
    role_shifts: bool = ROLE_SHIFTS

    @property
    def kind(self) -> Kind:
        """Of its fleet."""
        num_ranks = max(NUM_RANKS, 2) if self.cell.process in RANKS else NUM_RANKS
        return Kind(self.connector, self.queue_policy, self.role_shifts, num_ranks)

    def title(self) -> str:
        """The row of the matrix, and what is special."""
        parts = [self.cell.process.value, self.cell.fault.value, *self._more()]
        return " ".join(parts)

    def __str__(self) -> str:
        return "-".join([str(self.cell), *self._more()])

    def _more(self) -> list[str]:
        more = [self.interface] if self.interface != "grpc" else []
        more += [self.cut.name.lower()] if self.cut is not Cut.BOTH else []
        more += [self.queue_policy] if self.queue_policy != QUEUE_POLICY else []
        more += ["shifts"] if self.role_shifts != ROLE_SHIFTS else []
        return more


def cases() -> list[Case]:
    """By connector, so that each fleet is started once."""
    found: list[Case] = []
    for connector in CONNECTORS:
        for cell in sorted(CELLS, key=lambda one: one.process in RANKS):
            if expected(cell, connector).end is End.NOT_POSSIBLE:
                continue
            if connector == "nixl" and not _matters_to_p2p(cell):
                continue
            if connector == "lmcache" and not _matters_to_server(cell):
                continue
            found.append(Case(cell, connector))
            if connector == "shared_storage" and cell.fault in (Fault.CANCEL, Fault.DEADLINE):
                found.append(Case(cell, connector, interface="rest"))
            if cell.fault is Fault.CUT and cell.moment in (Moment.MID_TRANSFER, Moment.MID_DECODE):
                found += [Case(cell, connector, cut=cut) for cut in (Cut.OUTGOING, Cut.INCOMING)]
    if not QUEUE_POLICY and not ROLE_SHIFTS:
        in_mid_shift = partial(Case, connector="shared_storage", queue_policy="slo", role_shifts=True)
        found += [in_mid_shift(cell) for cell in CELLS if cell in QUICK_IN_MID_SHIFT]
    return found


def sixth(found: Iterable[Case], number: int) -> list[Case]:
    """With each connector, each fault of each process at one moment: at the next one in the next of the NUM_PARTS
    parts, which together are the whole matrix."""
    found = list(found)
    moments: dict[tuple[str, Process, Fault], list[Moment]] = {}
    for case in found:
        its = moments.setdefault((case.connector, case.cell.process, case.cell.fault), [])
        if case.cell.moment not in its:
            its.append(case.cell.moment)
    at = {key: its[(place + number) % len(its)] for place, (key, its) in enumerate(moments.items())}
    return [one for one in found if one.cell.moment is at[one.connector, one.cell.process, one.cell.fault]]


def chosen() -> list[Case]:
    """What FAULTS_SIXTH asks for."""
    if not 0 <= SIXTH <= NUM_PARTS:
        raise pytest.UsageError(f"FAULTS_SIXTH: {SIXTH} is not one of 1 to {NUM_PARTS}, or 0 for all")
    return sixth(cases(), SIXTH) if SIXTH else cases()


def _matters_to_p2p(cell: Cell) -> bool:
    if cell.fault is Fault.DEADLINE and cell.moment is Moment.BETWEEN_CHUNKS:
        return False  # the producer is stopped so long that the read is overdue: UCX may end it (`kv_store.nixl`)
    return cell.moment in P2P_MOMENTS or cell.process in P2P_PROCESSES


def _matters_to_server(cell: Cell) -> bool:
    return cell.moment in P2P_MOMENTS or cell.process is Process.STORE


def _param(case: Case) -> object:
    is_usual = case == Case(case.cell, "shared_storage")
    is_quick = (is_usual and case.cell in QUICK) or case.role_shifts != ROLE_SHIFTS
    return pytest.param(case, id=f"{case.connector}-{case}", marks=() if is_quick else pytest.mark.faults)


@pytest.mark.parametrize("case", [_param(case) for case in chosen()])
def test_cell(stages: Stages, case: Case) -> None:
    cell, stage = case.cell, stages.get(case.kind)
    if cell.fault is Fault.CUT and stage.network is None:
        pytest.skip(stage.why_no_network)
    if cell.fault is Fault.FULL_DISK and stage.setting.disk.why_not:
        pytest.skip(stage.setting.disk.why_not)
    try:
        Trial(stage, case).run()
    except BaseException:
        stages.close()  # whoever is dead or held by now would fail the cells after this one
        raise


class Trial:
    """One cell, tried until its moment was hit."""

    def __init__(self, stage: Stage, case: Case) -> None:
        self._stage, self._case, self._cell = stage, case, case.cell
        self._outcome = expected(case.cell, case.connector)
        if case.cut is Cut.INCOMING:
            self._outcome = heard_all_the_same(self._outcome)
        # A producer that UCX ends: while a cut lasts, or some seconds after the other end is back.
        self._may_end = case.connector == "nixl" and case.cell.fault in (Fault.CUT, Fault.SIGSTOP)
        stage.fleet.next_router()
        self._url = stage.fleet.http
        if case.interface == "rest" and case.cell.fault is Fault.DEADLINE:
            self._url = stage.hasty  # over REST it is the router that sets the deadline

    def run(self) -> None:
        missed: list[str] = []
        for number in range(MAX_TRIES):
            try:
                self._run_once(number)
            except MissedError as error:
                missed.append(str(error))
            else:
                return
        raise AssertionError(f"the moment was missed {MAX_TRIES} times: {missed}")

    # ------------------------------------------------------------------------------------------- one try

    def _run_once(self, number: int) -> None:
        stage = self._stage
        if self._cell == Cell(Process.STORE, Moment.QUEUED, Fault.CORRUPT_FILE):
            self._run_on_stored_prefix()
            return
        client, ask = stage.client(), self._ask(number)
        counters = watch.Counters(stage.fleet, self._url)
        scene = Scene(stage.setting, client, ask, self._url)
        harm = Harm(self._cell, scene, stage.setting.disk, stage.network, self._case.cut)
        try:
            scene.reach(self._cell.moment)
            harm.do()
            self._see_it_end(scene, harm, counters)
        except MissedError:
            harm.undo()
            client.cancel()
            client.outcome()
            self._settle()
            self._let_ask_store_again()
            raise
        finally:
            harm.undo()
        self._check(ask, counters)

    def _ask(self, number: int) -> Ask:
        stage, cell, is_rest = self._stage, self._cell, self._case.interface == "rest"
        name = f"{cell.process}-{cell.fault}-{cell.moment}".replace(" ", "_")
        is_mute = cell.process in (Process.CLIENT, Process.ROUTER) and cell.fault in (Fault.SIGSTOP, Fault.CUT)
        is_long = is_mute or cell.fault is Fault.DEADLINE
        timeout_s = 280.0
        if cell.fault is Fault.DEADLINE:
            timeout_s = HASTY_TIMEOUT_S + 60 if is_rest else TIMEOUTS_S[min(number, len(TIMEOUTS_S) - 1)]
        max_tokens = LONG_ANSWER if is_long else NUM_TOKENS
        return stage.ask(name, max_tokens=max_tokens, timeout_s=timeout_s, url=self._url if is_rest else "")

    def _see_it_end(self, scene: Scene, harm: Harm, counters: watch.Counters) -> None:
        """The request's end, and that whoever lives is free of it while the fault lasts."""
        cell, client = self._cell, scene.client
        is_mute = cell.process is Process.CLIENT and cell.fault in (Fault.SIGKILL, Fault.SIGSTOP, Fault.CUT)
        is_late = is_mute or (cell.process is Process.ROUTER and cell.fault in (Fault.SIGSTOP, Fault.CUT))
        if not is_late:
            self._check_told(client.outcome())
        self._free(harm.living(), may_end=self._may_end)
        if cell.process is Process.ROUTER and cell.fault is not Fault.SIGKILL:
            if cell.fault is Fault.CUT:  # healed earlier, it might go on
                wait_for("the router gives the request up", lambda: counters.num_ended() > 0, FREE_WITHIN_S)
            harm.undo()
            if self._outcome.end is End.SAME_ANSWER:
                wait_for("the answer goes on elsewhere", lambda: self._has_moved(client.told, counters), 120)
                client.cancel()  # more than enough of a long one
            self._check_told(client.outcome())
        elif is_mute and cell.fault is not Fault.SIGKILL:
            harm.undo()
            assert client.outcome().outcome != "OK"

    def _has_moved(self, told: Told, counters: watch.Counters) -> bool:
        if told.outcome:
            return True
        counted = counters.since()
        return told.num_tokens >= NUM_TOKENS and counted[Counted.RETRY] + counted[Counted.MIGRATION] > 0

    def _check_told(self, told: Told) -> None:
        end = self._outcome.end
        if end is End.SAME_ANSWER:
            assert told.outcome in ("OK", "CANCELLED"), told
            assert told.token_ids[:NUM_TOKENS] == self._stage.reference.token_ids, told
            if told.outcome == "OK":
                self._check_report(told)
        elif end is End.CANCELLED:
            assert told.outcome == "CANCELLED", told
        elif end is End.DEADLINE:
            assert told.outcome in ("DEADLINE_EXCEEDED", "timeout_error"), told
        else:
            assert told.outcome == "UNAVAILABLE", told

    def _check_report(self, told: Told) -> None:
        """The answer says itself what it took."""
        reported = {
            Counted.RETRY: told.num_retries > 0,
            Counted.PREFILL_RETRY: told.num_retries > 0,
            Counted.MIGRATION: told.num_migrations > 0,
            Counted.FALLBACK: bool(told.fallback_reason),
        }
        for what in self._outcome.counted & set(reported):
            assert reported[what], told
        retries = {Counted.RETRY, Counted.PREFILL_RETRY}
        possible = self._outcome.counted | self._outcome.may_count
        for what in set(reported) - possible - (retries if retries & possible else set()):
            assert not reported[what], told

    def _free(self, members: list[Member], *, may_end: bool = False) -> None:
        """Every block of `members` is free or cached, every lease has ended, and their books are right."""
        last: list[str] = []

        def are_free() -> bool:
            if may_end:
                restart_whom_ucx_ended(self._stage.fleet, {member.name for member in members})
            last[:] = [reason for member in members if (reason := watch.unsettled(member))]
            return not last

        try:
            wait_for("whoever lives is free", are_free, FREE_WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(last)}") from None

    # ---------------------------------------------------------------------------------------- afterwards

    def _check(self, ask: Ask, counters: watch.Counters) -> None:
        """What must hold after every cell."""
        stage = self._stage
        if self._cell != Cell(Process.ROUTER, self._cell.moment, Fault.SIGKILL):
            self._check_counters(counters)
            for what in self._outcome.counted & set(LOGGED):
                wait_for(f"the log tells of the {what}", lambda what=what: _is_logged(stage, ask, LOGGED[what]))  # type: ignore[misc]
        revive(stage.fleet, num_ranks=stage.kind.num_ranks, may_end=self._may_end)
        self._settle()
        self._let_ask_store_again()
        next_answer = stage.answer("next")
        assert next_answer.token_ids == stage.reference.token_ids, next_answer
        self._settle()

    def _check_counters(self, counters: watch.Counters) -> None:
        outcome = self._outcome
        if self._cell.process is Process.ROUTER and self._cell.fault is Fault.SIGSTOP:  # the test cancelled the rest
            outcome = replace(outcome, counted=outcome.counted | {Counted.CANCELLED})
        last: dict[Counted, float] = {}

        def are_right() -> bool:
            last.update(counters.since())
            return _is_counted(outcome, last)

        try:
            wait_for("it is counted", are_right)
        except AssertionError:
            found = {what.value: number for what, number in last.items() if number}
            raise AssertionError(f"counted {found}, expected {outcome.words()}") from None

    def _let_ask_store_again(self) -> None:
        """Until a worker asks again whether its lost LMCache server is back, it computes instead."""
        if self._case.connector == "lmcache" and self._cell.process is Process.STORE:
            time.sleep(RETRY_AFTER_S[1])

    def _settle(self) -> None:
        self._free(self._stage.fleet.members, may_end=self._may_end)
        self._stage.setting.disk.empty()

    # --------------------------------------------------------------------------------------- stored prefix

    def _run_on_stored_prefix(self) -> None:
        """An earlier request's files go bad. They are read while a later one waits, on the decode worker that does not
        have their blocks in its own memory."""
        stage, client = self._stage, self._stage.client()
        if stage.setting.shifts is not None:
            stage.setting.shifts.rearrange()
        first = stage.ask("stored-prefix")
        client.ask(first)
        told = client.outcome()
        assert told.token_ids == stage.reference.token_ids, told
        for path in stage.setting.disk.files():
            corrupt(path, 0)  # its length stays, so that it is found before it is read
        counters = watch.Counters(stage.fleet, self._url)
        first_worker = told.decode_worker
        for _ in range(MAX_TRIES):  # decode workers take turns if their load is the same
            client.ask(first)
            told = client.outcome()
            assert told.token_ids == stage.reference.token_ids, told
            if told.decode_worker != first_worker:
                break
        self._check(first, counters)


def _is_counted(outcome: Outcome, found: dict[Counted, float]) -> bool:
    possible = outcome.counted | outcome.may_count
    return all(found[what] > 0 for what in outcome.counted) and not any(
        number for what, number in found.items() if what not in possible
    )


def _is_logged(stage: Stage, ask: Ask, words: str) -> bool:
    """In a line that names the request."""
    logs = (path.read_text(errors="replace") for path in stage.folder.glob("*.log"))
    return any(ask.request_id in line and words in line for log in logs for line in log.splitlines())
