"""The lab's HTTP application: the page's files, stored views, and jobs that stream JSON lines."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Final, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clearhead.lab.desk import Busy, Desk, Job
from clearhead.lab.guard import Guard, refusal
from clearhead.lab.limits import Limits
from clearhead.lab.views import Views, policy_of
from clearhead.lab.work import Work

__all__ = ["application", "page_files"]

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
#: Files of the viewer that the page shares.
_SHARED: Final = ("dom.js", "colours.js")
_BODY_SECONDS: Final = 15.0
#: How often a running job's time limit is checked, and how long the job may take to notice the limit itself.
_LOOK_EVERY, _GRACE = 0.25, 1.0


def application(works: Iterable[Work], *, desk: Desk, views: Views, limits: Limits, token: str, port: int) -> Guard:
    """The lab as an ASGI application for one token and port."""
    table = {work.name: work for work in works}
    page_table = page_files()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name not in page_table:
            raise HTTPException(404, "lab: not found.")
        body, kind = page_table[name]
        return Response(body, media_type=kind)

    async def view(request: Request) -> Response:
        html = views.get(request.path_params["name"])
        if html is None:
            raise HTTPException(404, "lab: this view is no longer stored. Press Look again.")
        headers = {"content-security-policy": policy_of(html)}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    async def work(request: Request) -> Any:
        entry = table.get(request.path_params["name"])
        if entry is None:
            raise HTTPException(404, "lab: there is no such job.")
        params = await _params(request, limits.body)
        return _Answer(entry, params, desk, limits)

    routes = [
        Route("/", file, methods=["GET"]),
        Route("/views/{name}", view, methods=["GET"]),
        Route("/works/{name}", work, methods=["POST"]),
        Route("/{name}", file, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    # A path with an additional or missing slash is not found.
    app.router.redirect_slashes = False
    return Guard(app, token=token, port=port)


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page: content and media type by name, with "" for the page itself.

    They are read once. A request's name is looked up in this table and never used as a file system path.
    """
    package = files("clearhead")
    paths = [*(package / "lab" / "page").iterdir(), *(package / "inspector" / "viewer" / name for name in _SHARED)]
    places_by_name = {place.name: place for place in paths if place.name.rpartition(".")[2] in _TYPES}
    table = {name: (place.read_bytes(), _TYPES[name.rpartition(".")[2]]) for name, place in places_by_name.items()}
    return {"": table.pop("lab.html"), **table}


async def _refused(_: Request, failure: Exception) -> Any:
    assert isinstance(failure, HTTPException)
    said = failure.detail if failure.detail.startswith("lab:") else f"lab: {failure.detail.lower()}."

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await refusal(send, failure.status_code, said)

    return answer


async def _params(request: Request, most: int) -> Mapping[str, Any]:
    """The request's JSON object, read up to the size limit."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "lab: only application/json is accepted.")
    too_long = HTTPException(413, f"lab: a request must have at most {most:,} bytes. Send less.")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, "lab: the request did not arrive in time.") from None
    try:
        params = json.loads(body, parse_constant=_no_number, parse_float=_finite)
        # Lone surrogates cannot be encoded.
        json.dumps(params, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise HTTPException(400, "lab: the request must be JSON.") from None
    if not isinstance(params, dict):
        raise HTTPException(400, "lab: the request must be one JSON object.")
    return params


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


class _Answer:
    """Streams a job's progress and result; the job is cancelled if the client disconnects."""

    def __init__(self, work: Work, params: Mapping[str, Any], desk: Desk, limits: Limits) -> None:
        self._work, self._params, self._desk, self._limits = work, params, desk, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

        def tell(line: dict[str, Any]) -> None:
            try:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            except RuntimeError:
                # The server has stopped before the job.
                job.cancel()

        try:
            job = self._desk.take(self._work, self._params, tell)
        except Busy:
            await refusal(send, 503, self._busy())
            return
        gone = asyncio.ensure_future(_left(receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"application/x-ndjson")],
                }
            )
            last = False
            while not last and not gone.done():
                line = await self._next(job, lines, gone)
                if line is None:
                    continue
                last = "progress" not in line
                await send({"type": "http.response.body", "body": _encoded(line), "more_body": not last})
        except OSError:
            # The client disconnected during a write.
            pass
        finally:
            self._desk.drop(job)
            gone.cancel()

    async def _next(
        self, job: Job, lines: asyncio.Queue[dict[str, Any]], gone: asyncio.Future[None]
    ) -> dict[str, Any] | None:
        """The next line; None if the client has disconnected."""
        asked, getting = time.monotonic(), asyncio.ensure_future(lines.get())
        either: set[asyncio.Future[Any]] = {getting, gone}
        try:
            while True:
                await asyncio.wait(either, timeout=_LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    return getting.result()
                if gone.done():
                    return None
                if job.cancelled:
                    # The lab is stopping, and the job's own line may come too late.
                    return job.given_up()
                if job.started is not None and time.monotonic() - job.started > job.seconds + _GRACE:
                    return job.too_long()
                if job.started is None and time.monotonic() - asked > self._limits.patience:
                    return {"error": self._busy()}
        finally:
            getting.cancel()

    def _busy(self) -> str:
        return f"busy: {self._work.name} cannot start, as {self._limits.works} jobs are running. Try again soon."


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
