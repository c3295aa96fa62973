"""TCP ports on 127.0.0.1 that lead into another network namespace.

A socket belongs to the namespace of the thread that makes it. One thread moves into the other namespace and makes all
outgoing sockets; everything else stays outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import threading
from concurrent.futures import Future

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
Address = tuple[str, int]


class Forwarder:
    """`target` is a process in the other namespace."""

    def __init__(self, target: int) -> None:
        self._wanted: queue.SimpleQueue[tuple[Address, Future[socket.socket]] | None] = queue.SimpleQueue()
        self._listeners: list[socket.socket] = []
        self._connector = threading.Thread(target=self._connect_all, args=(target,), daemon=True)
        self._connector.start()

    def forward(self, host: str, port: int) -> int:
        """A port on 127.0.0.1 whose connections go to `host:port` in there."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener, (host, port)), daemon=True).start()
        number: int = listener.getsockname()[1]
        return number

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._wanted.put(None)
        self._connector.join()

    def _connect_all(self, target: int) -> None:
        with open(f"/proc/{target}/ns/net") as namespace:
            error = os.strerror(ctypes.get_errno()) if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET) else ""
        while (wanted := self._wanted.get()) is not None:
            _, future = wanted
            try:
                if error:
                    raise OSError(f"cannot enter the network namespace: {error}")
                # Connected by the caller: a slow target must not hold up the others.
                future.set_result(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            except OSError as failure:
                future.set_exception(failure)

    def _accept(self, listener: socket.socket, address: Address) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client, address), daemon=True).start()

    def _serve(self, client: socket.socket, address: Address) -> None:
        future: Future[socket.socket] = Future()
        self._wanted.put((address, future))
        with client:
            try:
                server = future.result(timeout=10)
            except (OSError, TimeoutError):
                return  # the client sees a closed connection, as from a host that is down
            with server:
                try:
                    server.connect(address)
                except OSError:
                    return
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
