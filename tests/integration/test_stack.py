"""What other tests rely on: fleets whose processes are started again, and clients that say what became of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.stack import Fleet, OneHost, ready_fields
from tests.kube import load
from tests.kube.load import Load, at_once


class Echo(OneHost):
    """Its processes do nothing but say what their environment has."""

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", "echo ready release=$RELEASE; exec sleep 600"]


class Older(Fleet):
    def environ_of(self, name: str) -> Mapping[str, str]:
        return {"RELEASE": f"before-{name}"}

    def all_ready(self) -> bool:
        return True


def test_a_router_that_is_started_again_is_of_the_same_release(tmp_path: Path) -> None:
    fleet = Older(tmp_path, prefill=0, decode=0, routers=2, hosts=Echo())
    try:
        for name in ("router", "router-1"):
            assert ready_fields(fleet.router) == {"release": f"before-{name}"}
            fleet.restart_router()
            assert ready_fields(fleet.router) == {"release": f"before-{name}"}
            fleet.next_router()
    finally:
        fleet.stop()


def test_what_ends_a_client_is_raised() -> None:
    """Whatever its kind, and whatever the test raises that waits for that client in vain."""
    has_ended = threading.Event()

    def ask(number: int, stop: threading.Event) -> None:
        if number == 1:
            has_ended.set()
            raise KeyError("no such answer")
        stop.wait()

    def wait_in_vain() -> None:
        has_ended.wait(60)
        raise TimeoutError("no more answers")

    with pytest.raises(ExceptionGroup) as caught, at_once(2, ask):
        wait_in_vain()
    assert [repr(error) for error in caught.value.exceptions] == ["KeyError('no such answer')"]
    assert isinstance(caught.value.__context__, TimeoutError)


def test_a_load_without_clients_waits_for_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = 0
    answers: dict[str, str] = {}

    def ask_rest(port: int, question: str, max_tokens: int) -> str:
        nonlocal num_asked
        num_asked += 1
        return "" if num_asked <= len(load.QUESTIONS) else answers[question]

    monkeypatch.setattr(load, "ask_rest", ask_rest)
    with pytest.raises(ExceptionGroup, match="clients ended"), Load(1, 1, interfaces=("rest",)) as clients:
        clients.more_answers(1)
