"""The server of the page: its files, its stream of events, and what its buttons do.

Each open page has a `Source` of its own, and is sent the next events only when it has taken those before, so
a slow one costs no memory. A page that connects again gets everything anew, behind a message `begin`; the
message `live` follows what was there already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trahiv_cli.errors import SetupError, TrahivError
from trahiv_cli.watch.guard import Guard
from trahiv_cli.watch.lookout import Lookout
from trahiv_cli.watch.tail import Source

HOST = "127.0.0.1"
POLL_S = 0.25
MAX_BODY_BYTES = 10_000
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

Deed = Callable[[dict[str, Any]], dict[str, Any]]
"""What a button does: takes what the page says of it, and returns what the page is to know of its outcome."""


class Page:
    """A page on this machine alone.

    Args:
        source: makes what one open page reads.
        token: who has it may read.
        port: 0 for a free one. SetupError if it is taken.
        deeds: what its buttons do, by their names; others are not shown.
        about: what else it is told of itself.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        token: str,
        port: int = 0,
        *,
        lookout: Lookout | None = None,
        deeds: Mapping[str, Deed] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._lookout = lookout
        self._deeds = deeds or {}
        self._turn = threading.Lock()
        self._about = {"deeds": list(self._deeds), **(about or {})}
        self._socket = listening(port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/?token={token}"
        app = Starlette(routes=self._routes())
        config = uvicorn.Config(
            Guard(app, self.port, token), lifespan="off", ws="none", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=1, timeout_keep_alive=60,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self, tell: Callable[[], None]) -> None:
        """Serve it until SIGINT or SIGTERM; `tell` says that it is there."""

        def end(*_: object) -> None:
            self._server.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)  # uvicorn raises again what it caught
        # In the end a page that does not read is cut, which is no news.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self._server.should_exit)
        tell()
        self._server.run([self._socket])

    def _routes(self) -> list[Route]:
        async def about(_: Request) -> Response:
            return JSONResponse(self._about | {"now": time.time()})

        async def events(_: Request) -> Response:
            return StreamingResponse(self._messages(), media_type="text/event-stream")

        routes = [Route("/about", about), Route("/events", events)]
        routes += [Route("/do/{deed}", self._do, methods=["POST"])]
        return routes + [_file(path) for path in (Path(__file__).parent / "page").rglob("*.*")]

    async def _messages(self) -> AsyncIterator[bytes]:
        yield b"retry: 1000\nevent: begin\ndata: {}\n\n"
        told = b""
        is_live = False
        with closing(self._source()) as source:
            while not self._server.should_exit:
                lines = source.read()
                is_all = not lines
                if is_all and self._lookout and self._lookout.newest != told:
                    told = self._lookout.newest
                    lines.append(told)
                if lines:
                    yield b"data: [" + b",".join(lines) + b"]\n\n"
                if is_all and not is_live:
                    is_live = True
                    yield b"event: live\ndata: {}\n\n"
                await asyncio.sleep(POLL_S if is_all else 0)

    async def _do(self, request: Request) -> Response:
        deed = self._deeds.get(request.path_params["deed"])
        if deed is None:
            return JSONResponse({"message": "This page does not offer that.", "hint": ""}, 404)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"message": "This is too long.", "hint": ""}, 413)
        try:
            wanted = json.loads(body or b"{}")
            if not isinstance(wanted, dict):
                raise ValueError
        except ValueError:
            return JSONResponse({"message": "This is not an object of JSON.", "hint": ""}, 400)
        try:
            return JSONResponse(await run_in_threadpool(self._in_turn, deed, wanted))
        except TrahivError as error:
            return JSONResponse({"message": error.message, "hint": error.hint}, 409)

    def _in_turn(self, deed: Deed, wanted: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            return deed(wanted)


def _file(path: Path) -> Route:
    content = path.read_bytes()
    kind = KINDS.get(path.suffix, "text/plain")

    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return Route("/" if path.name == "index.html" else f"/{path.name}", answer)


def listening(port: int) -> socket.socket:
    """Listen on a port of this machine that others cannot reach; SetupError if it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise SetupError(
            f"Port {port} of this machine cannot be used: {error.strerror}.",
            hint="name another, or let one be chosen: --port 0",
        ) from error
    listener.listen()
    return listener
