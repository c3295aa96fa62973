"""Hosts on a network of their own, made of namespaces, so that one of them can be cut off while its processes go on.

    this process ── admin bridge ──┬── host a ──┬── data bridge
                                   ├── host b ──┤
                                   └── host c ──┘

What is tested travels over the data bridge; a cut takes a host off that one only. Over the admin bridge a test looks at
a host that is cut off. Namespaces live as long as a process in them, and those end with this one, however it ends:
nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from tests.kube.processes import Process, wait_until

_TOOLS = ("ip", "nsenter", "unshare", "iptables")
_HOLD = "mount -t sysfs baton /sys && exec sleep infinity"  # libraries look there for the links of their host


UCX_ENVIRON = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "data"}  # or blocks would go over the bridge that is never cut


class Cut(Enum):
    """What is taken from a host."""

    BOTH = "link down"
    OUTGOING = "what it sends is dropped"
    INCOMING = "what it should receive is dropped"


class Network:
    """Root only; see `why_not`. Every method may be called at any time; `close` ends everything inside.

    Hosts see file systems as they are mounted when this is made.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._number = _free_subnet()
        self._link = f"bt{self._number}-{os.getpid() % 100000}"
        self._addresses = {name: number for number, name in enumerate(names, start=2)}
        self._cut: dict[str, Cut] = {}
        self._holders: dict[str, Process] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def host(self, name: str) -> str:
        """Address on the data bridge."""
        return f"198.18.{self._number}.{self._addresses[name]}"

    def admin_host(self, name: str) -> str:
        """Address by which this process reaches the host, cut off or not."""
        return f"198.19.{self._number}.{self._addresses[name]}"

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """`argv` as run on a host. The process itself is the command, not a wrapper around it."""
        return ["nsenter", f"--target={self._holders[name].popen.pid}", "--net", "--mount", "--wd", "--", *argv]

    def cut(self, name: str, cut: Cut = Cut.BOTH) -> None:
        self._cut[name] = cut
        if cut is Cut.BOTH:
            self._ip("switch", f"link set data-{self._addresses[name]} down")
        else:
            self._iptables(name, "-A", cut)

    def heal(self, name: str) -> None:
        cut = self._cut.pop(name, None)
        if cut is Cut.BOTH:
            self._ip("switch", f"link set data-{self._addresses[name]} up")
        elif cut is not None:
            self._iptables(name, "-D", cut)

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()  # the namespace goes with it, and the far end of each of its links
        self._holders.clear()

    # ------------------------------------------------------------------------------------------ internals

    def _build(self) -> None:
        self._hold("switch")
        for bridge in ("data", "admin"):
            self._ip("switch", f"link add br-{bridge} type bridge")
            self._ip("switch", f"link set br-{bridge} up")
        for name in self._addresses:
            self._hold(name)
            number = self._addresses[name]
            for network, address in (("data", self.host(name)), ("admin", self.admin_host(name))):
                port = f"{network}-{number}"
                target = self._holders[name].popen.pid
                self._ip("switch", f"link add {port} type veth peer name {network} netns {target}")
                self._ip("switch", f"link set {port} master br-{network} up")
                self._ip(name, f"addr add {address}/24 dev {network}")
                self._ip(name, f"link set {network} up")
            self._ip(name, "link set lo up")
        switch = self._holders["switch"].popen.pid
        _run(["ip", *f"link add {self._link} type veth peer name admin-1 netns {switch}".split()])
        self._ip("switch", "link set admin-1 master br-admin up")
        _run(["ip", *f"addr add 198.19.{self._number}.1/24 dev {self._link}".split()])
        _run(["ip", "link", "set", self._link, "up"])

    def _hold(self, name: str) -> None:
        command = ["unshare", "--net", "--mount", "bash", "-c", _HOLD]
        holder = Process(name, command, self._folder / f"host-{name}.log")
        self._holders[name] = holder
        program = Path(f"/proc/{holder.popen.pid}/comm")
        wait_until(f"namespace of {name}", lambda: program.read_text() == "sleep\n", 30, [holder])

    def _ip(self, name: str, arguments: str) -> None:
        _run(self.command(name, ["ip", *arguments.split()]))

    def _iptables(self, name: str, action: str, cut: Cut) -> None:
        chain, option = ("OUTPUT", "-o") if cut is Cut.OUTGOING else ("INPUT", "-i")
        _run(self.command(name, ["iptables", "-w", action, chain, option, "data", "-j", "DROP"]))


def why_not(folder: Path) -> str:
    """Why networks cannot be made here; empty if they can. Tries it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)}"
    try:
        network = Network(folder, ["probe"])
    except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}"
    try:
        network.cut("probe", Cut.INCOMING)
        network.heal("probe")
        with socket.socket() as unused:  # nobody listens there; that this is said at once shows that packets travel
            unused.settimeout(5)
            refused = unused.connect_ex((network.admin_host("probe"), 9)) == 111
        return "" if refused else "network namespaces: packets are not let through"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be cut here: {error.stderr}"
    finally:
        network.close()


def _free_subnet() -> int:
    """The third byte of addresses that no interface here has (198.18.0.0/15 is set aside for tests of networks)."""
    taken = subprocess.run(["ip", "-4", "addr"], check=True, capture_output=True, text=True).stdout
    start = os.getpid()
    return next(n for n in ((start + offset) % 256 for offset in range(256)) if f" 198.19.{n}." not in taken)


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)
