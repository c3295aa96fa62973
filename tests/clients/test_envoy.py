"""A real Envoy, with the configuration of docs/envoy.yaml, before two routers that are its endpoint pickers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from baton.stack.stack_plan import free_ports
from tests.clients.test_clients import ROOT
from tests.integration.simulated import write_simulated_model
from tests.integration.stack import START_TIMEOUT_S, Fleet, RouterMember, kill, running, wait_for
from tests.kube.processes import Process

ENVOY = ROOT / ".venv-clients" / "bin" / "envoy"
CONFIG = ROOT / "docs" / "envoy.yaml"
MAX_REQUESTS = 3  # of each router
NAMES = ("router", "router-1")


class Gateway(Fleet):
    """Two simulated decode workers, two routers, and Envoy before them."""

    def __init__(self, folder: Path) -> None:
        http = free_ports(2)
        self._http = dict(zip(NAMES, http, strict=True))
        self._pickers = dict(zip(NAMES, free_ports(2), strict=True))
        self._keys = folder / "keys"
        self._keys.write_text("a secret that is long enough for signatures\n")
        write_simulated_model(folder / "model")
        flags = ("--device=simulated", "--simulated-time=xeon-135m", "--max-model-len=4096")
        router_flags = (f"--max-requests={MAX_REQUESTS}", "--request-timeout=60")
        super().__init__(
            folder, f"--model={folder / 'model'}", *flags, prefill=0, decode=2, routers=2, router_flags=router_flags
        )
        self.admin, port = (f"http://127.0.0.1:{one}" for one in free_ports(2))
        self.url = port
        ports = {8080: self.url, 9901: self.admin}
        config = CONFIG.read_text()
        for number, address in ports.items():
            config = config.replace(f"port_value: {number}", f"port_value: {address.rpartition(':')[2]}")
        for number, name in enumerate(NAMES, 1):
            config = config.replace(f"port_value: 901{number}", f"port_value: {self._pickers[name]}")
            config = config.replace(f"port_value: 800{number}", f"port_value: {self._http[name]}")
        file = folder / "envoy.yaml"
        file.write_text(config)
        command = [str(ENVOY), "-c", str(file), "--log-level", "warning", "--concurrency", "1", "--use-dynamic-base-id"]
        self.envoy = Process("envoy", command, folder / "envoy.log", dict(os.environ))
        try:
            wait_for("Envoy knows both pickers", lambda: self.num_healthy_pickers() == 2, START_TIMEOUT_S)
        except BaseException:
            print(self.envoy.tail(40))
            self.stop()
            raise

    def _new_router(self, name: str, http: int, grpc: int) -> RouterMember:
        return super()._new_router(name, self._http[name], grpc)

    def _start_router(self, name: str, http: int, grpc: int, *flags: str, host: str) -> Process:
        replicas = ",".join(f"127.0.0.1:{port}" for port in self._http.values())
        picker = (
            f"--endpoint-picker-listen=127.0.0.1:{self._pickers[name]}",
            f"--endpoint-picker-address=127.0.0.1:{http}",
            f"--endpoint-picker-replicas={replicas}",
            f"--endpoint-picker-key-file={self._keys}",
        )
        return super()._start_router(name, http, grpc, *flags, *picker, host=host)

    def num_healthy_pickers(self) -> int:
        assert self.envoy.running, self.envoy.tail(40)
        try:
            lines = httpx.get(f"{self.admin}/clusters", timeout=10).text.splitlines()
        except httpx.TransportError:
            return 0
        return sum(line.startswith("pickers::") and line.endswith("::health_flags::healthy") for line in lines)

    def counts(self, name: str, label: str) -> dict[str, float]:
        """Of both routers together, by what `label` says."""
        found: dict[str, float] = {}
        for router in self.routers:
            if router.process.running:
                for line in httpx.get(f"{router.http}/metrics", timeout=20).text.splitlines():
                    if line.startswith(f'{name}{{{label}="'):
                        key, number = line.split('"')[1], float(line.rpartition(" ")[2])
                        found[key] = found.get(key, 0.0) + number
        return found

    def picks(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """What pickers answered, who served it, and what became of it at the router."""
        return (
            self.counts("baton_router_picks_total", "outcome"),
            self.counts("baton_router_picks_served_total", "by"),
            self.counts("baton_router_picked_requests_total", "outcome"),
        )

    def answers(self) -> dict[str, float]:
        """Those that ended, by why."""
        return self.counts("baton_router_answers_total", "reason")

    def stop(self) -> None:
        if hasattr(self, "envoy"):
            self.envoy.kill()
        super().stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if not ENVOY.exists():
        pytest.skip("there is no Envoy in .venv-clients: `make clients` installs it")
    one = Gateway(tmp_path_factory.mktemp("envoy"))
    with running(one):
        yield one


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60) as one:
        yield one


LONG = {"prompt": "hello there", "max_tokens": 3500, "stream": True, "ignore_eos": True}
"""A stream of half a minute, which tests leave."""


def ask(client: httpx.Client, **fields: object) -> httpx.Response:
    body = {"model": "model", "prompt": "hello there", "max_tokens": 8, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {key: number - before.get(key, 0) for key, number in after.items() if number != before.get(key, 0)}


def until_grown(gateway: Gateway, before: tuple[dict[str, float], ...], expected: tuple[dict[str, float], ...]) -> None:
    """Waits: a picker hears of a response beside the client."""

    def is_so() -> bool:
        found = tuple(grown(*pair) for pair in zip(before, gateway.picks(), strict=True))
        return found == expected

    try:
        wait_for(f"the metrics grow by {expected}", is_so)
    except AssertionError as error:
        found = tuple(grown(*pair) for pair in zip(before, gateway.picks(), strict=True))
        raise AssertionError(f"{error}, but by {found}") from None


def test_what_the_picker_chose_is_what_is_done(gateway: Gateway, client: httpx.Client) -> None:
    before = gateway.picks()
    answer = ask(client)
    assert answer.status_code == 200, answer.text
    again = httpx.post(
        f"{gateway.http}/v1/completions", json={"prompt": "hello there", "max_tokens": 8, "temperature": 0}
    )
    assert answer.json()["choices"][0]["text"] == again.json()["choices"][0]["text"]
    long = ask(client, prompt="hello world " * 300, user="x" * 300_000)  # in many pieces through Envoy and the picker
    assert long.status_code == 200, long.text
    assert long.json()["usage"]["prompt_tokens"] == 602
    until_grown(gateway, before, ({"workers": 2}, {"first": 2}, {"followed": 2}))


def test_a_stream_comes_as_it_is_made(gateway: Gateway, client: httpx.Client) -> None:
    before, answers = gateway.picks(), gateway.answers()
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        for _ in range(20):  # of 7,000: if Envoy or the picker held lines back, the answer would have its end by now
            assert next(lines) != "data: [DONE]"
    until_grown(gateway, before, ({"workers": 1}, {"first": 1}, {"followed": 1}))
    wait_for("the answer has ended", lambda: grown(answers, gateway.answers()) == {"cancelled": 1})


def test_refusals_are_those_of_the_router(gateway: Gateway, client: httpx.Client) -> None:
    before = gateway.picks()
    answer = ask(client, max_tokens=-5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert client.get("/v1/models").json()["data"][0]["id"] == "model"
    until_grown(gateway, before, ({"router": 2}, {"first": 2}, {}))


def test_a_client_that_leaves_frees_its_place_and_a_full_fleet_says_so(gateway: Gateway, client: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        read: list[Iterator[str]] = []  # an iterator that nobody holds closes its stream
        for _ in range(2 * MAX_REQUESTS):
            answer = stack.enter_context(client.stream("POST", "/v1/completions", json=LONG))
            assert answer.status_code == 200
            read.append(answer.iter_lines())
            next(read[-1])
        before = gateway.picks()
        refused = ask(client)
        assert refused.status_code == 429, refused.text
        assert float(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["message"]
        # A full picker names the other router, which it cannot know to be full, too: that one refused.
        until_grown(gateway, before, ({"workers": 1}, {"first": 1}, {}))
    gateway.settle()  # no worker has a request
    wait_for("there is room again", lambda: ask(client).status_code == 200)


def test_a_router_that_is_killed_is_passed_over(gateway: Gateway, client: httpx.Client) -> None:
    victim = gateway.routers[1]
    kill(victim.process)
    with ThreadPoolExecutor(2) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda _: ask(client), range(6))]
    assert set(statuses) <= {200, 500, 502, 503, 504}  # some asked the dead picker, which Envoy does not know yet
    wait_for("Envoy asks the other picker alone", lambda: gateway.num_healthy_pickers() == 1)
    for _ in range(6):
        assert ask(client).status_code == 200
    before = gateway.picks()
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()  # held: one that nobody holds closes its stream
        next(lines)
        until_grown(gateway, before, ({"workers": 1}, {"first": 1}, {"followed": 1}))
        before = gateway.picks()
        assert ask(client).status_code == 200
        # The dead router has fewer requests, so it is named first, and Envoy goes to the second one that is named.
        until_grown(gateway, before, ({"workers": 1}, {"fallback": 1}, {"followed": 1}))
    gateway.next_router()
    gateway.restart_router()
    gateway.next_router()
    wait_for("both pick again", lambda: gateway.num_healthy_pickers() == 2)
    assert ask(client).status_code == 200
