"""Guided text of every kind across a prefill and a decode worker, whatever happens to it: the grammar's state follows
from the tokens, so the answers are those of one undisturbed engine, and have their form.

Workers compute prompts in chunks of 16 tokens, and have few blocks.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from baton import LLM, SamplingParams
from baton.client.report import Result
from baton.client.sync_client import Client
from common.types import FinishReason
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.guided_kinds import KINDS, NUM_PROMPT_TOKENS, write_model
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, Member, kill, running, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

BLOCK_SIZE = 16
NUM_BLOCKS = 96  # of a worker: eight answers do not fit
NUM_PROMPT_BLOCKS = -(-NUM_PROMPT_TOKENS // BLOCK_SIZE)
MANY = 10**6  # tokens, more than any answer has
MAX_TRIES = 8

Texts = Mapping[str, tuple[tuple[int, ...], str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Texts:
    """(token ids, text) by kind: one engine, one request at a time, prompts whole."""
    found = {}
    with LLM(str(model), dtype="float32", num_threads=1, num_blocks=256) as llm:
        for name, kind in KINDS.items():
            params = SamplingParams(**(kind.options | {"guided": kind.guided}))
            (output,) = llm.generate([kind.prompt], params, use_tqdm=False)
            answer = output.outputs[0]
            assert (answer.finish_reason, bool(kind.is_valid(answer.text))) == ("stop", True), name
            assert len(answer.token_ids) > 80, name  # long enough to be disturbed
            found[name] = (tuple(answer.token_ids), answer.text)
    return found


@pytest.fixture(scope="module")
def fleet(model: Path, undisturbed: Texts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two decode workers, so that an answer can go on when one is killed."""
    size = (f"--num-blocks={NUM_BLOCKS}", "--max-model-len=1024", f"--block-size={BLOCK_SIZE}", "--chunk-size=16")
    patience = f"--engine-timeout={CALL_TIMEOUT_S}"  # of fronts, while a test holds their engines
    fleet = Fleet(
        tmp_path_factory.mktemp("fleet"),
        f"--model={model}",
        *size,
        patience,
        prefill=1,
        decode=2,
        router_flags=("--min-remote-tokens=1",),
    )
    with running(fleet):
        yield fleet


class Asked:
    """Answers to `names` under way; each of `num_tokens` says how far one has come."""

    def __init__(self, client: Client, names: Sequence[str], salts: Sequence[str]) -> None:
        self.num_tokens = [0] * len(names)
        self.ids = [uuid.uuid4().hex for _ in names]
        self._client, self._changed = client, threading.Condition()
        self._pool = ThreadPoolExecutor(len(names))
        self.names = names
        self._futures: list[Future[Result]] = [
            self._pool.submit(self._ask, index, name, salt)
            for index, (name, salt) in enumerate(zip(names, salts, strict=True))
        ]

    def _ask(self, index: int, name: str, salt: str) -> Result:
        kind = KINDS[name]
        try:
            answer = self._client.generate(
                kind.prompt, cache_salt=salt, request_id=self.ids[index], **(kind.options | {"guided": kind.guided})
            )
            for chunk in answer:
                self._count(index, len(chunk.token_ids))
            return answer.result()
        except BaseException:
            self._count(index, MANY)  # nobody waits for it any more
            raise

    def _count(self, index: int, num_tokens: int) -> None:
        with self._changed:
            self.num_tokens[index] += num_tokens
            self._changed.notify_all()

    def wait_for_tokens(self, num: int) -> None:
        """Until all have so many, at least, or failed: `results` says why."""
        with self._changed:
            assert self._changed.wait_for(lambda: min(self.num_tokens) >= num, CALL_TIMEOUT_S)

    def results(self) -> list[tuple[str, Result]]:
        found = [future.result(CALL_TIMEOUT_S) for future in self._futures]
        self._pool.shutdown()
        return list(zip(self.names, found, strict=True))


def check(results: Sequence[tuple[str, Result]], undisturbed: Texts) -> None:
    for name, result in results:
        assert (result.token_ids, result.text) == undisturbed[name], name
        assert result.finish_reason is FinishReason.STOP
        assert KINDS[name].is_valid(result.text)


def members(fleet: Fleet, role: str) -> list[Member]:
    return [member for member in fleet.members if member.role == role]


class Held:
    """Engines that are stopped until `let_go`."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}

    def hold(self, members: Sequence[Member]) -> None:
        for member in members:
            self._pids[member.name] = watch.engine_pid(member)
            os.kill(self._pids[member.name], signal.SIGSTOP)

    def let_go(self, members: Sequence[Member]) -> None:
        for member in members:
            if pid := self._pids.pop(member.name, None):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def holding(fleet: Fleet) -> Iterator[Held]:
    held = Held()
    try:
        yield held
    finally:
        held.let_go(fleet.members)


def test_once_more_with_the_prefix_cached(fleet: Fleet, undisturbed: Texts, salt: Salt) -> None:
    """Prompt and answer of the first time."""
    one_salt = salt()
    with fleet.client() as client:
        for is_warm in (False, True):
            results = Asked(client, list(KINDS), [one_salt] * len(KINDS)).results()
            check(results, undisturbed)
            assert all(bool(result.usage.cached_tokens) is is_warm for _, result in results)
            assert is_warm or all(result.report.prefill_worker for _, result in results)


def test_preempted(fleet: Fleet, undisturbed: Texts, salt: Salt) -> None:
    """Answers that begin together do not fit into a worker's blocks together."""
    left, decode = set(KINDS), members(fleet, "decode")
    names = [*KINDS] * 5
    for _ in range(MAX_TRIES):
        with fleet.client() as client, holding(fleet) as held:
            held.hold(decode)
            asked = Asked(client, names, [salt() for _ in names])
            wait_for("all are sent", lambda: num_sent(fleet, decode) == len(names), CALL_TIMEOUT_S)
            held.let_go(decode)
            results = asked.results()
        check(results, undisturbed)
        left -= {name for name, result in results if result.report.num_preemptions}
        if not left:
            return
    raise AssertionError(f"never preempted: {left}")


def num_sent(fleet: Fleet, to: Sequence[Member]) -> float:
    samples = watch.scrape(f"{fleet.http}/metrics")
    return sum(watch.total(samples, "baton_router_endpoint_requests", address=member.address) for member in to)


def test_the_prompt_s_kv_is_lost(fleet: Fleet, undisturbed: Texts, salt: Salt) -> None:
    """After the first token has come, and before a block has moved: the decode worker computes the prompt."""
    prefill, decode = members(fleet, "prefill"), members(fleet, "decode")
    before, num_blocks = set(files(fleet)), len(KINDS) * NUM_PROMPT_BLOCKS
    with fleet.client() as client, holding(fleet) as held:
        held.hold(prefill)
        asked = Asked(client, list(KINDS), [salt() for _ in KINDS])
        wait_for("decode workers wait for KV", lambda: num_running(decode) == len(KINDS), CALL_TIMEOUT_S)
        held.hold(decode)
        held.let_go(prefill)
        asked.wait_for_tokens(1)
        wait_for("all blocks are there", lambda: len(set(files(fleet)) - before) == num_blocks, CALL_TIMEOUT_S)
        assert asked.num_tokens == [1] * len(KINDS)
        for path in set(files(fleet)) - before:
            path.unlink()
        held.let_go(decode)
        results = asked.results()
    check(results, undisturbed)
    for _, result in results:
        assert result.report.fallback_reason
        assert result.report.num_blocks_moved == 0
        assert result.report.num_migrations == 0


def num_running(of: Sequence[Member]) -> int:
    return sum(watch.load(member).num_running for member in of)


def files(fleet: Fleet) -> list[Path]:
    """One for each block that is handed over."""
    return list(fleet.kv_dir.rglob("*.kv"))


def test_a_decode_worker_is_killed_in_mid_answer(fleet: Fleet, undisturbed: Texts, salt: Salt) -> None:
    """One that has answers to each form: they go on at the other worker."""
    left, names = set(KINDS), [*KINDS] * 3
    for _ in range(MAX_TRIES):
        with fleet.client() as client:
            asked = Asked(client, names, [salt() for _ in names])
            asked.wait_for_tokens(4)
            victim = next((one for one in members(fleet, "decode") if left <= kinds_at(fleet, one, asked)), None)
            if victim is not None:
                kill(victim.process)
            try:
                results = asked.results()
            finally:
                if victim is not None:
                    fleet.replace(victim)
        check(results, undisturbed)
        migrated = [(name, result) for name, result in results if result.report.num_migrations]
        assert all(victim and result.report.decode_worker != victim.address for _, result in migrated)
        left -= {name for name, _ in migrated}
        if not left:
            return
    raise AssertionError(f"never migrated: {left}")


def kinds_at(fleet: Fleet, member: Member, asked: Asked) -> set[str]:
    """Kinds of the answers that `member` was asked for."""
    made = httpx.get(f"{fleet.http}/decisions", params={"limit": 100}).raise_for_status().json()["decisions"]
    there = {one["request_id"] for one in made if one["decode_worker"] == member.address}
    return {name for name, request_id in zip(asked.names, asked.ids, strict=True) if request_id in there}
