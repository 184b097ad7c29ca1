"""Who may talk to the lab: a page of its own address, with its token, on this machine."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "refusal"]

#: What the lab's own pages may do: run and load what the lab serves, and nothing else.
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
#: Where a request may come from, as browsers say it: typed, or from this very origin.
_SITES: Final = ("none", "same-origin")


class Guard:
    """Lets a request through whose host, origin and token are the lab's, and hardens every answer.

    Behind it paths begin after the token.
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
                own = {name.decode("latin-1").lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items() if name not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = self._against(scope)
        if found is not None:
            await refusal(hardened, *found)
            return
        _, _, rest = scope["path"][1:].partition("/")
        await self._app({**scope, "path": f"/{rest}", "raw_path": None, "root_path": ""}, receive, hardened)

    def _against(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is refused, as status and line; None where it is not."""
        host, origin, site = (_only(scope, name) for name in (b"host", b"origin", b"sec-fetch-site"))
        if host not in self._hosts:
            return 421, "lab: answers to 127.0.0.1 and localhost only. Open the address that it printed."
        if site is not None and site not in _SITES:
            return 403, "lab: answers no other page. Open the address that it printed."
        if origin is not None and origin != f"http://{host}":
            return 403, "lab: answers no page of another origin. Open the address that it printed."
        token, slash, _ = scope["path"][1:].partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not slash:
            return 404, "lab: nothing is here. Open the whole address that it printed, up to its last slash."
        return None


def _only(scope: Scope, name: bytes) -> str | None:
    """A header's value, "" where it is there twice; None where it is absent."""
    values = [value for key, value in scope["headers"] if key == name]
    if not values:
        return None
    return values[0].decode("latin-1") if len(values) == 1 else ""


async def refusal(send: Send, status: int, line: str) -> None:
    """Answer with one line, as the page reads it."""
    body = json.dumps({"error": line}).encode() + b"\n"
    headers: list[Any] = [(b"content-type", b"application/x-ndjson"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
