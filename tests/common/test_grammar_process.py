"""Grammars that break or stall the native parser end a process of their own, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import bounded_process, grammar_process
from common.errors import UnavailableError
from common.grammar_process import GrammarProcess, GrammarThreads, ModelTokens
from common.guided import Guided
from tests.router.tiny_tokenizer import eos_id, tokenizer_files, vocab_size

LEAST = -(2**63)
GOOD = Guided(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


def schema(value: object) -> Guided:
    return Guided(json_schema=json.dumps(value))


def chain(length: int, link: str) -> Guided:
    """Definitions that each refer to the next one."""

    def step(index: int) -> dict[str, object]:
        following = {"$ref": f"#/$defs/d{index + 1}"}
        return {link: {"items": following, "properties": {"a": following}}.get(link, [following])}

    steps = {f"d{index}": step(index) for index in range(length)}
    return schema({"$ref": "#/$defs/d0", "$defs": {**steps, f"d{length}": {"type": "integer"}}})


def rules(length: int) -> str:
    return "\n".join(f'r{index}: "a" r{index + 1}' for index in range(length)) + f'\nr{length}: "z"'


def options(length: int) -> str:
    return "\n".join(f'r{index} ::= "x"? r{index + 1}' for index in range(length)) + f'\nr{length} ::= "z"'


def multiple_of(number: int) -> str:
    return f'%json {{"type": "integer", "multipleOf": {number}}}'


OF_ITSELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
TWO = {
    "a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/b"}], "minItems": 1},
    "b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]},
}
HOSTILE = {
    "const": (schema({"const": LEAST}), "cannot be kept exactly"),
    "enum": (schema({"enum": [1, LEAST]}), "cannot be kept exactly"),
    "bounds": (schema({"type": "integer", "minimum": -1e30, "maximum": -1e29}), "cannot be kept exactly"),
    "lark-json": (Guided(grammar=f'start: %json {{"const": {LEAST}}}'), "cannot be kept exactly"),
    "tag": (
        Guided(
            structural_tag=json.dumps({"format": {"type": "json_schema", "json_schema": {"const": LEAST}}}),
        ),
        "cannot be kept exactly",
    ),
    **{f"chain-{link}": (chain(1100, link), "refers too often") for link in ("items", "anyOf", "allOf", "properties")},
    "rules": (Guided(grammar=f"start: r0\n{rules(990)}"), "refers too often"),
    "many-rules": (Guided(grammar=f"start: r0\n{rules(3000)}"), "has more than 1000 rules"),
    "ebnf": (Guided(grammar=f"root ::= r0\n{rules(990).replace(':', ' ::=')}"), "refers too often|costs more"),
    "costly": (Guided(grammar=f"start: {' | '.join(map(multiple_of, range(99901, 100000, 2)))}"), "costs more than"),
    "options": (Guided(grammar=f"root ::= r0\n{options(2500)}"), "has more than 1000 rules"),
    "multiple": (schema({"type": "integer", "multipleOf": 9999991}), "multipleOf at #: has too many digits"),
    "multiples": (schema({"allOf": [{"multipleOf": one} for one in (7, 11, 13, 17, 19)]}), "too large together"),
    "object-of-itself": (schema({"$ref": "#/$defs/n", "$defs": {"n": OF_ITSELF}}), "text without end"),
    "items-of-itself": (schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "text without end"),
    "two-of-each-other": (
        schema({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": TWO}),
        "text without end",
    ),
    "repeated": (Guided(grammar='start: a{100000}\na: "x"'), "text without end, or one that is far too long"),
    "rule-of-itself": (Guided(grammar='start: "a" start'), "text without end"),
    "repetitions": (Guided(regex="(?:a?){500}a{500}"), "costs too much"),
}


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """What costs too much costs processor time, and on a busy machine that may take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_process, "MAX_ANSWER_S", 200.0)
        yield


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    return ModelTokens(str(file), vocab_size(), (eos_id(),))


@pytest.fixture(scope="module", params=["bytes", pytest.param("tokens", marks=pytest.mark.slow)])
def process(request: pytest.FixtureRequest, tokens: ModelTokens) -> Iterator[GrammarProcess]:
    process = GrammarProcess(None if request.param == "bytes" else tokens)
    yield process
    process.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "ebnf" else ()) for name in HOSTILE]
)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_checked(process: GrammarProcess, name: str) -> None:
    guided, words = HOSTILE[name]
    process.check(GOOD)
    keeper = process.pid
    with pytest.raises(ValueError, match=words) as caught:
        process.check(guided)
    (kind,) = guided.kinds
    assert str(caught.value).startswith(kind)
    assert " cannot be used: " in str(caught.value)
    assert process.check(GOOD).grammar
    assert process.pid == keeper  # what died was a copy of it, which costs nothing to replace


@pytest.mark.parametrize(
    "guided",
    [
        GOOD,
        chain(100, "items"),
        Guided(choice=tuple(f"{index} of many" for index in range(1000))),
        Guided(choice=("long" * 16000,)),
        Guided(regex="<[|]im_end[|]>"),
        Guided(grammar='start: a{0,100000}\na: "x"'),
        Guided(structural_tag='{"format": {"type": "token", "token": 3}}'),
        schema({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}),
    ],
    ids=lambda guided: str(guided)[:40],
)
def test_what_can_be_used_passes(process: GrammarProcess, guided: Guided) -> None:
    assert process.check(guided).grammar


@pytest.fixture
def fresh() -> Iterator[GrammarProcess]:
    process = GrammarProcess()
    yield process
    process.close()
    assert process.pid is None


def test_a_process_that_was_ended_is_started_again(fresh: GrammarProcess) -> None:
    process = fresh
    process.check(GOOD)
    keeper = process.pid
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    await_end(keeper)
    assert process.check(GOOD).grammar
    assert process.pid != keeper


def test_a_grammar_that_only_waited_is_not_to_blame(fresh: GrammarProcess) -> None:
    process = fresh
    with process._lock, pytest.raises(UnavailableError, match="others") as caught:
        process.check(GOOD, 0.0)
    assert caught.value.retry_after_s
    assert process.pid is None  # and it was not even started


def test_a_process_that_does_not_answer_is_ended(fresh: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process = fresh
    process.check(GOOD)
    assert process.pid is not None
    (runner,) = children(process.pid)
    os.kill(runner, signal.SIGSTOP)
    await_state(runner, "T")
    monkeypatch.setattr(bounded_process, "MAX_ANSWER_S", 0.1)
    with pytest.raises(UnavailableError, match="no time"):
        process.check(GOOD)
    os.kill(runner, signal.SIGCONT)
    await_end(runner)
    monkeypatch.undo()
    assert process.check(GOOD).grammar


PARENT = """
import json, os, socket, sys, threading, time
from common.grammar_process import GrammarProcess
from common.guided import Guided
server = socket.create_server(("127.0.0.1", 0))
process = GrammarProcess()
process.check(Guided(regex="a"))
some = [json.dumps({"type": "integer", "multipleOf": number}) for number in range(99901, 100000, 2)]
costly = Guided(grammar="start: " + " | ".join(f"%json {schema}" for schema in some))
print(process.pid, flush=True)
if sys.argv[1] == "busy":
    process.check(costly)
time.sleep(600)
"""


@pytest.mark.parametrize("at", ["idle", "busy"])
def test_it_ends_with_its_parent_and_has_none_of_its_sockets(at: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, at], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keeper = int(parent.stdout.readline())
    (runner,) = children(keeper)
    for pid in (keeper, runner):
        assert not any("socket" in str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for pid in (keeper, runner):
        await_end(pid)


def test_threads_that_compile_what_passed_have_larger_stacks() -> None:
    threads = GrammarThreads(1, "grammar", max_pending=1, full="too many")
    assert threads.submit("", threading.get_ident).result() != threading.get_ident()
    assert grammar_process.LIMITS.stack_bytes < grammar_process.LARGER_STACK_BYTES
    assert threading.stack_size() == 0  # others' are as they were
    threads.close()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def await_end(pid: int) -> None:
    await_state(pid, "Z")


def await_state(pid: int, wanted: str) -> None:
    """Or its end. Pytest's own time limit is what fails."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == wanted:
            return
        time.sleep(0.01)
