"""Discovery against real sockets: fixed addresses, names, and a server that plays EndpointSlices."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from common.config import RouterSettings
from common.errors import ConfigError, StartupError
from router.fleet.discovery.base import Discovery, Found
from router.fleet.discovery.dns import Dns
from router.fleet.discovery.follow import fixed, follow
from router.fleet.discovery.kubernetes import EndpointSlices, found_in
from router.fleet.discovery.sources import discover, is_static
from router.server import serve
from tests.support.fake_api_server import FakeApiServer, endpoint, endpoint_slice, fake_api_server

WAIT_S = 20.0


class Follower:
    """Reads sets until the wanted one comes."""

    def __init__(self, discovery: Discovery) -> None:
        self.sets: AsyncGenerator[tuple[Found, ...], None] = discovery.watch()

    async def next(self) -> tuple[str, ...]:
        found = await asyncio.wait_for(anext(self.sets), WAIT_S)
        return tuple(one.address for one in found)

    async def until(self, *addresses: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.next() != addresses:
                pass


@asynccontextmanager
async def following(discovery: Discovery) -> AsyncIterator[Follower]:
    follower = Follower(discovery)
    async with aclosing(follower.sets):
        yield follower


@pytest.mark.parametrize(
    "text",
    ["worker", "worker:", "worker:0", "worker:70000", "a b:1", "http://a:1", "dns://a:1", "dns:///a", "dns:///a:99999",
     "k8s:///ns/svc", "k8s://ns/svc:grpc", "k8s:///NS/svc:grpc", "k8s:///svc:grpc", "::1:50061"],
)  # fmt: skip
def test_misspelled_endpoints_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--decode") as raised:
        discover(["10.0.0.1:50061", text], key="--decode")
    assert repr(text) in str(raised.value)


def test_static_endpoints_are_told_from_moving_ones() -> None:
    assert is_static(["a:1", "[::1]:2", "unix:/run/worker.sock"])
    assert not is_static(["a:1", "dns:///b:2"])


async def test_static_endpoints_come_at_once() -> None:
    discovery = discover(["b:2", "a:1", "[::1]:3", "unix:/run/x"])
    assert discovery.complete
    async with following(discovery) as follower:
        assert await follower.next() == ("[::1]:3", "a:1", "b:2", "unix:/run/x")


async def test_no_endpoints_are_a_set_too() -> None:
    async with following(discover([])) as follower:
        assert await follower.next() == ()


async def test_every_address_of_a_name_is_a_worker() -> None:
    answers: list[list[str] | int] = [
        ["10.0.0.2:5", "10.0.0.1:5"],
        socket.EAI_AGAIN,  # nobody could say: nothing changes
        ["10.0.0.2:5"],
        socket.EAI_NONAME,  # no worker is left
        ["10.0.0.3:5"],
    ]

    async def look_up(name: str, port: int) -> list[str]:
        assert (name, port) == ("workers", 5)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, int):
            raise socket.gaierror(answer, "as told")
        return answer

    async with following(Dns("workers", 5, interval_s=0, look_up=look_up)) as follower:
        assert await follower.next() == ("10.0.0.1:5", "10.0.0.2:5")
        assert await follower.next() == ("10.0.0.2:5",)
        assert await follower.next() == ()
        assert await follower.next() == ("10.0.0.3:5",)


async def test_a_real_name_is_resolved() -> None:
    async with following(discover(["dns:///localhost:50061"])) as follower:
        assert "127.0.0.1:50061" in await follower.next()


async def test_a_name_without_an_answer_is_not_complete() -> None:
    asked = asyncio.Event()

    async def look_up(name: str, port: int) -> list[str]:
        asked.set()
        raise socket.gaierror(socket.EAI_AGAIN, "as told")

    source = Dns("workers", 5, interval_s=0, look_up=look_up)
    async with aclosing(source.watch()) as sets:
        first = asyncio.ensure_future(anext(sets))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        assert not source.complete
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def test_a_pod_that_terminates_but_serves_stays_and_one_that_does_not_goes() -> None:
    slices = [
        endpoint_slice(
            "s",
            endpoint("10.0.0.1", "ready"),
            endpoint("10.0.0.2", "terminating", serving=True, ready=False),
            endpoint("10.0.0.3", "starting", serving=False, ready=False),
            endpoint("10.0.0.4", "old-server", serving=None, ready=None),
            endpoint("10.0.0.5", "old-server-unready", serving=None, ready=False),
        )
    ]
    assert [one.pod for one in found_in(slices, "grpc")] == ["ready", "terminating", "old-server"]
    assert [one.address for one in found_in(slices, "50061")] == [f"10.0.0.{i}:50061" for i in (1, 2, 4)]
    assert found_in(slices, "http") == ()


def test_a_pod_of_a_dual_stack_service_is_one_worker() -> None:
    slices = [
        endpoint_slice("a", endpoint("fd00::1", "p"), endpoint("fd00::2", "q"), address_type="IPv6"),
        endpoint_slice("b", endpoint("10.0.0.1", "p")),
    ]
    assert found_in(slices, "grpc") == (Found("10.0.0.1:50061", "p"), Found("[fd00::2]:50061", "q"))


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")
    async with fake_api_server(tmp_path) as (server, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield server


async def test_pods_are_found_and_followed(api: FakeApiServer) -> None:
    api.set(endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    async with following(discover(["k8s:///prod/decode:grpc", "10.9.9.9:1"])) as follower:
        assert await follower.next() == ("10.9.9.9:1",)
        await follower.until("10.0.0.1:50061", "10.9.9.9:1")
        api.set(endpoint_slice("s2", endpoint("10.0.0.2", "p2")))
        await follower.until("10.0.0.1:50061", "10.0.0.2:50061", "10.9.9.9:1")
        api.delete("s1")
        await follower.until("10.0.0.2:50061", "10.9.9.9:1")


async def test_a_watch_that_breaks_goes_on_from_where_it_was(api: FakeApiServer) -> None:
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    async with following(EndpointSlices("prod", "decode", "grpc")) as follower:
        await follower.until("10.0.0.1:50061")
        api.set(endpoint_slice("s", endpoint("10.0.0.2", "p2")))
        await follower.until("10.0.0.2:50061")
        api.drop()
        api.set(endpoint_slice("s", endpoint("10.0.0.3", "p3")))
        await follower.until("10.0.0.3:50061")
    assert api.requests.count("list") == 1


@pytest.mark.parametrize("inside", [True, False])
async def test_gone_is_a_new_list(api: FakeApiServer, *, inside: bool) -> None:
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    async with following(EndpointSlices("prod", "decode", "grpc")) as follower:
        await follower.until("10.0.0.1:50061")
        del api.items["s"]  # an event that nobody will hear of
        if inside:
            api.error(410)
        else:
            api.forget()
            api.drop()
        await follower.until()
    assert api.requests.count("list") == 2


async def test_bookmarks_are_where_a_watch_goes_on(api: FakeApiServer) -> None:
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    async with following(EndpointSlices("prod", "decode", "grpc")) as follower:
        await follower.until("10.0.0.1:50061")
        api.set(endpoint_slice("s", endpoint("10.0.0.2", "p2")))
        await follower.until("10.0.0.2:50061")
        waiting = asyncio.ensure_future(follower.until("10.0.0.3:50061"))
        api.bookmark()
        api.oldest = api.version  # only who has read the bookmark can go on
        num_watches = api.requests.count("watch")
        api.end_watches()
        async with asyncio.timeout(WAIT_S):
            while api.requests.count("watch") == num_watches:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
        api.set(endpoint_slice("s", endpoint("10.0.0.3", "p3")))
        await waiting
    assert api.requests.count("list") == 1


async def test_a_restart_of_the_api_server_loses_nobody(api: FakeApiServer) -> None:
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    async with following(EndpointSlices("prod", "decode", "grpc")) as follower:
        await follower.until("10.0.0.1:50061")
        waiting = asyncio.ensure_future(follower.next())
        await api.stop()
        await asyncio.sleep(0.3)
        assert not waiting.done()
        api.forget()
        await api.start()
        api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1"), endpoint("10.0.0.2", "p2")))
        assert await asyncio.wait_for(waiting, WAIT_S) == ("10.0.0.1:50061", "10.0.0.2:50061")


async def test_a_refusal_is_asked_again(api: FakeApiServer, caplog: pytest.LogCaptureFixture) -> None:
    api.fail_with = 403
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    source = EndpointSlices("prod", "decode", "grpc")
    async with following(source) as follower:
        first = asyncio.ensure_future(follower.next())
        async with asyncio.timeout(WAIT_S):
            while len(api.requests) < 2:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
        assert not source.complete
        api.fail_with = None
        assert await asyncio.wait_for(first, WAIT_S) == ("10.0.0.1:50061",)
    assert any("not now" in str(vars(record).get("reason")) for record in caplog.records)


async def test_no_access_to_kubernetes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    async with following(discover(["k8s:///prod/decode:grpc"])) as follower:
        with pytest.raises(StartupError, match="no access to Kubernetes"):
            await follower.next()


async def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    async with following(discover(["k8s:///prod/decode:grpc"])) as follower:
        with pytest.raises(StartupError, match=r"baton-serve\[kubernetes\]"):
            await follower.next()


async def test_both_roles_are_followed_together(api: FakeApiServer) -> None:
    api.set(endpoint_slice("s", endpoint("10.0.0.1", "p1")))
    seen: asyncio.Queue[tuple[list[str], list[str]]] = asyncio.Queue()
    task = asyncio.create_task(
        follow(["a:1"], ["b:2", "k8s:///prod/decode:grpc"], lambda p, d: seen.put_nowait((list(p), list(d))))
    )
    async with asyncio.timeout(WAIT_S):
        assert await seen.get() == (["a:1"], ["b:2"])
        assert await seen.get() == (["a:1"], ["10.0.0.1:50061", "b:2"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_fixed_workers_need_no_following() -> None:
    assert fixed(["a:1", "dns:///b:2"]) == ["a:1"]
    await follow(["a:1"], ["b:2"], lambda p, d: pytest.fail("nothing changes"))
    with pytest.raises(ConfigError, match="prefill"):
        await follow(["nowhere"], [], lambda p, d: None)


async def test_a_router_that_cannot_discover_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    endpoints = ("k8s:///prod/worker:grpc",)
    settings = RouterSettings(
        prefill=endpoints, decode=endpoints, http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", drain_timeout=0
    )
    with pytest.raises(StartupError, match="no access to Kubernetes"):
        await asyncio.wait_for(serve(settings), WAIT_S)
