"""The live page's files at `/ui/`, and the ways that lead there. They hold nothing of the fleet, so they need no key:
what the page shows comes from `/ui/events` and REST, with the key that its visitor types in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(slots=True, frozen=True)
class _File:
    content: bytes
    kind: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, KINDS[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


class PageFiles:
    """An ASGI application around another, outside the one that asks for keys."""

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        """`root_path`: where a proxy shows REST; empty if it is not known."""
        self._app = app
        self._root_path = root_path
        self._files = {f"/ui/{path.name}": _read(path) for path in FOLDER.iterdir() if path.suffix in KINDS}
        self._files["/ui/"] = self._files.pop("/ui/index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            app = self._answer(scope["path"], Headers(scope=scope)) or app
        await app(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response | None:
        if (file := self._files.get(path)) is not None:
            about = {**SECURITY, "ETag": file.etag}
            if headers.get("if-none-match") == file.etag:
                return Response(status_code=304, headers=about)
            return Response(file.content, headers=about, media_type=file.kind)
        if path == "/ui" or (path == "/" and "text/html" in headers.get("accept", "")):
            # Relative if the path that a proxy shows this under is not known: browsers know it.
            location = f"{self._root_path}/ui/" if self._root_path else "ui/"
            return Response(status_code=307, headers={"Location": location})
        return None
