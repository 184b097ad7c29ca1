"""Access control of the lab: requests from its own page, with its token, on this machine."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "refusal"]

#: The content security policy of the lab's pages: only what the lab serves.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
#: Accepted values of Sec-Fetch-Site: a typed address, or the same origin.
_SITES: Final = ("none", "same-origin")


class Guard:
    """Accepts requests with the lab's host, origin and token, and adds security headers to every response.

    The wrapped application receives paths without the token.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.decode("latin-1").lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items() if name not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reason = self._against(scope)
        if reason is not None:
            await refusal(hardened, *reason)
            return
        _, _, rest = scope["path"][1:].partition("/")
        await self._app({**scope, "path": f"/{rest}", "raw_path": None, "root_path": ""}, receive, hardened)

    def _against(self, scope: Scope) -> tuple[int, str] | None:
        """The status and line of a refusal; None if the request is accepted."""
        host, origin, site = (_only(scope, name) for name in (b"host", b"origin", b"sec-fetch-site"))
        if host not in self._hosts:
            return 421, "lab: only 127.0.0.1 and localhost are served. Open the printed address."
        if site is not None and site not in _SITES:
            return 403, "lab: requests of other pages are refused. Open the printed address."
        if origin is not None and origin != f"http://{host}":
            return 403, "lab: requests of another origin are refused. Open the printed address."
        token, slash, _ = scope["path"][1:].partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not slash:
            return 404, "lab: not found. Open the whole printed address, with its last slash."
        return None


def _only(scope: Scope, name: bytes) -> str | None:
    """A header's value; "" if it occurs twice, None if it is absent."""
    values = [value for key, value in scope["headers"] if key == name]
    if not values:
        return None
    return values[0].decode("latin-1") if len(values) == 1 else ""


async def refusal(send: Send, status: int, line: str) -> None:
    """Send an error as one JSON line."""
    body = json.dumps({"error": line}).encode() + b"\n"
    headers: list[Any] = [(b"content-type", b"application/x-ndjson"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
