"""API keys: who may ask, and whose cached blocks may be shared with whom.

One key in a line, and what is known of it; `#` begins a comment:

    sk-1f3a…                     name=alice tenant=research
    sha256:9b74c9897bac770f…     name=ci          # its SHA-256 in hex: the file then holds no secret
    sk-77ab…                     name=ops operator=true

`name` (logs have it, never the key) is made of the hash if it is not given. Keys of one tenant share the KV blocks
of equal prefixes among themselves and with nobody else; keys without one share among those without. An operator's key
may give orders (`AdminService`), and sees at `/decisions` where requests of all tenants went; others see those of their
own. Only hashes are kept in memory. Keys should be random (`openssl rand -hex 24`): the hash of a guessable one can be
guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar

from common import metrics
from common.errors import ForbiddenError, StartupError, UnauthenticatedError
from common.logs import RareLine
from common.process.watched_files import FilesInUse, WatchedFiles, read_file
from router.limits.clients import NOBODY, ApiClient

log = logging.getLogger(__name__)

_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})$")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}$")
_FIELDS = ("name", "tenant", "operator")


class ApiKeys:
    """The keys in a file, read again when it changes. Raises `StartupError` if it is wrong, or holds no key."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._refusals = RareLine(log, "refused: no known API key")
        self._watched = WatchedFiles("api_keys", [path], self._load)

    def look(self) -> None:
        """Reads the file again if it has changed."""
        self._watched.current()

    def in_use(self) -> FilesInUse:
        """What is known of the file, after `look`."""
        return self._watched.in_use()

    def client(self, authorization: str | None, interface: str) -> ApiClient:
        """Whose key `Authorization: Bearer KEY` is. Raises `UnauthenticatedError`; `interface` is for the count."""
        scheme, _, key = (authorization or "").partition(" ")
        found: ApiClient | None = None
        if scheme.lower() == "bearer":
            digest = _digest(key.strip())
            # Through all of them, whichever it is: time says nothing of what the keys are.
            for known, client in self._watched.current().items():
                if hmac.compare_digest(known, digest):
                    found = client
        if found is None:
            metrics.router_unauthenticated.labels(interface).inc()
            self._refusals.happened({"interface": interface, "has_key": bool(authorization)})
            if authorization is None:
                raise UnauthenticatedError("an API key is needed: Authorization: Bearer KEY")
            raise UnauthenticatedError("the API key is not known here")
        return found

    def _load(self) -> Mapping[bytes, ApiClient]:
        try:
            text = read_file("api_keys_file", self._path).decode()
        except UnicodeDecodeError as error:
            raise StartupError(f"api_keys_file: {self._path} is not UTF-8") from error
        clients: dict[bytes, ApiClient] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            key, fields = words[0], dict(word.partition("=")[::2] for word in words[1:])
            where = f"api_keys_file: {self._path}, line {number}"  # and nothing of what it holds
            if len(fields) < len(words) - 1 or any(name not in _FIELDS for name in fields):
                raise StartupError(
                    f"{where}: after the key stand name=NAME, tenant=TENANT and operator=true, each once, or nothing"
                )
            if any(not _NAME.match(value) for value in fields.values()):
                raise StartupError(f"{where}: names are up to 64 letters, digits and . _ @ -")
            if not (key.isascii() and key.isprintable()):
                raise StartupError(f"{where}: keys travel in headers, so they are of ASCII alone")
            hashed = _HASHED.match(key)
            if key.startswith("sha256:") and hashed is None:
                raise StartupError(f"{where}: sha256: goes before 64 hexadecimal digits")
            if fields.get("operator", "true") != "true":
                raise StartupError(f"{where}: operator=true, or nothing of it")
            digest = bytes.fromhex(hashed[1]) if hashed else _digest(key)
            if digest in clients:
                raise StartupError(f"{where}: this key was there before")
            name = fields.get("name") or f"key-{digest.hex()[:8]}"
            clients[digest] = ApiClient(name, fields.get("tenant", ""), "operator" in fields)
        if not clients:  # nor later: whoever empties the file by mistake would lock everybody out
            raise StartupError(f"api_keys_file: {self._path} holds no key: nobody could ask anything")
        return clients


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


current_client: ContextVar[ApiClient | None] = ContextVar("current_client", default=None)
"""Whose call this is: set before any handler of either interface runs; None if no keys are asked for."""


def caller() -> ApiClient:
    """Whose call this is. Its `owner` has what the call may see of files, batches and stored responses."""
    return current_client.get() or NOBODY


def visible_tenant() -> str | None:
    """Whose requests the caller may see: its tenant's, or those of all (None) if it is an operator or no keys are asked
    for."""
    client = current_client.get()
    return None if client is None or client.is_operator else client.tenant


def check_operator(what: str) -> None:
    """Raises `ForbiddenError` if the caller's key is no operator's. `what` is that which it asked for."""
    client = current_client.get()
    if client is not None and not client.is_operator:
        raise ForbiddenError(f"{what} an operator's key (operator=true in the file of keys)")
