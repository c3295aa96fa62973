"""A path that a proxy shows REST under (`--root-path`). One that strips it and one that does not both work."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """An ASGI application around all others, which see paths without `root_path`."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"][len(self._root_path) :] or "/"
        await self._app(scope, receive, send)
