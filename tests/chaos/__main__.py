"""Two prefill and two decode workers under load, and something goes wrong every second.

    make chaos                                  10 minutes, shared_storage
    CHAOS_SECONDS=60 CHAOS_SEED=7 CHAOS_CONNECTOR=nixl make chaos

Faults: workers and engines killed, whole workers stopped for a while, the store wiped or corrupted, requests cancelled
or given too short a deadline. One decode worker is always left alone, so no request may fail. Every answer must be the
reference answer, greedy or seeded, made from transformers' logits, and in the end every block of every
worker is free or cached. Prints one line of JSON; exits 1 where anything of that does not hold.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from baton.client import CancelledError, Client
from common.errors import BatonError, DeadlineError
from common.types import WorkerState
from tests.chaos.tiny_model import random_prompt, reference_answer, write_tiny_model
from tests.integration.stack import START_TIMEOUT_S, Fleet, Member, alive, descendants, wait_for

NUM_CLIENTS = 4
FAULT_INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 60.0
MAX_ROUTER_GROWTH_MB = 100.0


@dataclass(slots=True, frozen=True)
class Case:
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Tally:
    """What became of the requests; shared by the client threads."""

    outcomes: Counter[str] = field(default_factory=Counter)
    extras: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, problem: str = "", **extras: int) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            self.extras.update(extras)
            if problem:
                self.problems.append(problem)
                print(f"{outcome}: {problem}", file=sys.stderr, flush=True)


def make_cases(rng: random.Random) -> list[Case]:
    """Half of them greedy, half sampled; prompts of 1 to 1,500 tokens, answers of 1 to 300."""
    lengths = [1, 15, 16, 17, 64, 200, 500, 900, 1500, *(rng.randrange(1, 1200) for _ in range(15))]
    return [
        Case(
            random_prompt(rng, length),
            rng.choice([1, 2, 20, 100, 300]),
            0.0 if number % 2 else 0.8,
            rng.randrange(2**31),
        )
        for number, length in enumerate(lengths)
    ]


def with_references(model_dir: Path, cases: list[Case]) -> tuple[list[Case], list[tuple[int, ...]]]:
    """The cases, shortened to end before a tie, and their answers; those without any are left out."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    kept, answers = [], []
    for case in cases:
        answer = reference_answer(model, case.prompt, case.max_tokens, temperature=case.temperature, seed=case.seed)
        if answer:
            kept.append(replace(case, max_tokens=len(answer)))
            answers.append(tuple(answer))
    return kept, answers


class ClientThread(threading.Thread):
    """Asks one request after the other; now and then it cancels one, or gives it too little time."""

    def __init__(
        self, fleet: Fleet, cases: list[Case], wanted: list[tuple[int, ...]], tally: Tally, seed: int, end_at: float
    ) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._fleet, self._cases, self._wanted, self._tally = fleet, cases, wanted, tally
        self._rng = random.Random(seed)
        self._end_at = end_at

    def run(self) -> None:
        try:
            with Client(self._fleet.grpc, timeout=REQUEST_TIMEOUT_S) as patient:
                while time.monotonic() < self._end_at:
                    self._one(patient)
        except Exception:
            self._tally.add("client error", traceback.format_exc())

    def _one(self, patient: Client) -> None:
        index = self._rng.randrange(len(self._cases))
        salt = f"{self._rng.randrange(2**40)}" if self._rng.random() < 0.7 else "warm"
        roll = self._rng.random()
        if roll < 0.1:
            self._cancelled(patient, index, salt)
        elif roll < 0.2:
            self._short(index, salt)
        else:
            self._whole(patient, index, salt)

    def _whole(self, client: Client, index: int, salt: str) -> None:
        case = self._cases[index]
        answer = client.generate(
            case.prompt,
            temperature=case.temperature,
            seed=case.seed,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            cache_salt=salt,
        )
        try:
            result = answer.result()
        except BatonError as error:
            self._tally.add("lost", f"case {index} after {len(answer.text)} characters: {error}")
            return
        report = result.report
        extras = {
            "migrations": report.num_migrations,
            "retries": report.num_retries,
            "fallbacks": int(bool(report.fallback_reason)),
            "blocks_moved": report.num_blocks_moved,
        }
        if result.token_ids == self._wanted[index]:
            self._tally.add("equal", **extras)
        else:
            pairs = zip(result.token_ids, self._wanted[index], strict=False)
            at = next((number for number, (got, want) in enumerate(pairs) if got != want), "the end")
            self._tally.add("wrong", f"case {index} differs at {at}: {report}", **extras)

    def _cancelled(self, client: Client, index: int, salt: str) -> None:
        case = self._cases[index]
        answer = client.generate(case.prompt, max_tokens=300, ignore_eos=True, cache_salt=salt)
        timer = threading.Timer(self._rng.random() * 0.5, answer.cancel)
        timer.start()
        try:
            answer.result()
            self._tally.add("too fast to cancel")
        except CancelledError:
            self._tally.add("cancelled")
        except BatonError as error:
            self._tally.add("lost", f"a request to be cancelled: {error}")
        finally:
            timer.cancel()

    def _short(self, index: int, salt: str) -> None:
        with Client(self._fleet.grpc, timeout=0.02 + self._rng.random() * 0.5) as hasty:
            try:
                hasty.generate(self._cases[index].prompt, max_tokens=300, ignore_eos=True, cache_salt=salt).result()
                self._tally.add("in time")
            except DeadlineError:
                self._tally.add("deadline")
            except BatonError as error:
                self._tally.add("lost", f"a request with a short deadline: {error}")


class Faults:
    """Harms the fleet, and repairs it a little later. Never both decode workers at a time."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet, self._rng = fleet, rng
        self._later: list[tuple[float, str, Callable[[], None]]] = []  # when, whose address, what
        self._harmed: set[str] = set()  # addresses
        self.counts: Counter[str] = Counter()

    def one(self) -> None:
        """Repairs what is due, then harms something."""
        self._repair(time.monotonic())
        kinds = ["kill worker", "kill engine", "stop worker", "wipe store", "corrupt store"]
        kind = self._rng.choice(kinds)
        if kind == "wipe store":
            self._each_file(lambda path: path.unlink(missing_ok=True), 1.0)
        elif kind == "corrupt store":
            self._each_file(_corrupt, 0.2)
        else:
            member = self._victim()
            if member is None:
                return
            self._harmed.add(member.address)
            pids = {member.process.popen.pid} | descendants(member.process.popen.pid)
            if kind == "stop worker":
                _signal(pids, signal.SIGSTOP)
                self._after(self._rng.uniform(0.5, 9.0), member, lambda: self._resume(member, pids))
            else:
                targets = pids - {member.process.popen.pid} if kind == "kill engine" else pids
                _signal(targets or pids, signal.SIGKILL)
                self._after(self._rng.uniform(1.0, 3.0), member, lambda: self._restart(member))
        self.counts[kind] += 1

    def repair_all(self) -> None:
        self._repair(float("inf"))
        wait_for("every worker is back", lambda: not self._unhealed(), START_TIMEOUT_S)

    def _repair(self, now: float) -> None:
        due = [action for at, _, action in self._later if at <= now]
        self._later = [item for item in self._later if item[0] > now]
        for action in due:
            action()

    def _after(self, delay_s: float, member: Member, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + delay_s, member.address, action))

    def _victim(self) -> Member | None:
        """Someone who is well, and, for a decode worker, whose colleague is well too."""
        healed = {w.address for w in self._fleet.workers() if w.state is WorkerState.READY and w.integrity == "ok"}
        self._harmed = {address for address in self._harmed if address not in healed or self._is_pending(address)}
        well = [member for member in self._fleet.members if member.address not in self._harmed]
        num_decode = sum(member.role == "decode" and member.address in healed for member in well)
        candidates = [member for member in well if member.role == "prefill" or num_decode > 1]
        return self._rng.choice(candidates) if candidates else None

    def _is_pending(self, address: str) -> bool:
        return any(whose == address for _, whose, _ in self._later)

    def _unhealed(self) -> list[str]:
        return [w.address for w in self._fleet.workers() if w.state is not WorkerState.READY or w.integrity != "ok"]

    def _resume(self, member: Member, pids: set[int]) -> None:
        _signal(pids, signal.SIGCONT)
        if not member.process.running:  # a transport may give up on a peer that was gone for long
            self._restart(member)

    def _restart(self, member: Member) -> None:
        left = {member.process.popen.pid} | descendants(member.process.popen.pid)
        _signal(alive(left), signal.SIGKILL)
        member.process.popen.wait()
        self._fleet.restart(member)

    def _each_file(self, action: Callable[[Path], None], share: float) -> None:
        for path in self._fleet.kv_dir.rglob("*.kv"):
            if self._rng.random() < share:
                action(path)


def _corrupt(path: Path) -> None:
    """Flips one byte in the middle, in place, as a bad disk would."""
    try:
        with path.open("r+b") as file:
            file.seek(max(path.stat().st_size // 2, 0))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))
    except (FileNotFoundError, IndexError, OSError):
        return  # wiped meanwhile


def _signal(pids: set[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(seconds: float, seed: int, connector: str, folder: Path) -> dict[str, object]:
    rng = random.Random(seed)
    model_dir = folder / "model"
    write_tiny_model(model_dir)
    cases, wanted = with_references(model_dir, make_cases(rng))
    flags = (f"--model={model_dir}", f"--connector={connector}", "--chunk-size=64", "--log-level=warning")
    fleet = Fleet(folder, *flags, prefill=2, decode=2)
    tally, faults = Tally(), Faults(fleet, rng)
    try:
        router_mb = _rss_mb(fleet.router.popen.pid)
        end_at = time.monotonic() + seconds
        clients = [ClientThread(fleet, cases, wanted, tally, seed + n, end_at) for n in range(1, NUM_CLIENTS + 1)]
        for client in clients:
            client.start()
        while time.monotonic() < end_at:
            time.sleep(FAULT_INTERVAL_S)
            faults.one()
            print(f"{end_at - time.monotonic():5.0f} s left, {dict(tally.outcomes)}", file=sys.stderr, flush=True)
        for client in clients:
            client.join(REQUEST_TIMEOUT_S + 30)
            if client.is_alive():
                tally.add("lost", f"{client.name} hangs")
        faults.repair_all()
        integrity = "ok"
        try:
            fleet.settle()
        except AssertionError as error:
            integrity = str(error)
        grown_mb = _rss_mb(fleet.router.popen.pid) - router_mb
    finally:
        fleet.stop()
    bad = tally.outcomes["wrong"] + tally.outcomes["lost"] + tally.outcomes["client error"]
    is_ok = not bad and integrity == "ok" and tally.outcomes["equal"] > 0 and grown_mb < MAX_ROUTER_GROWTH_MB
    return {
        "ok": is_ok,
        "seconds": seconds,
        "seed": seed,
        "connector": connector,
        "requests": dict(tally.outcomes),
        "faults": dict(faults.counts),
        **dict(tally.extras),
        "integrity": integrity,
        "router_growth_mb": round(grown_mb, 1),
    }


def main() -> int:
    seconds = float(os.environ.get("CHAOS_SECONDS", "600"))
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**31))
    connector = os.environ.get("CHAOS_CONNECTOR", "shared_storage")
    folder = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    print(f"chaos: {seconds:g} s, seed {seed}, {connector}; logs in {folder}", file=sys.stderr)
    outcome = run(seconds, seed, connector, folder)
    print(json.dumps(outcome), flush=True)
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
