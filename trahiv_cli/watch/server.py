"""The page's server: its files, its stream of events, and its buttons' actions.

Each open page has a `Source` of its own, and gets the next events only when it has read the previous ones, so
a slow page costs no memory. A page that reconnects gets all events again, after a message `begin`. A message
`live` follows the events of the past.
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

Deed = Callable[[dict[str, Any]], dict[str, Any]]
"""A button's action: it takes the page's request, and returns the fields of the answer to the page."""


class Page:
    """A page that is served to this machine only.

    `trahiv watch` and `trahiv replay` each make one, and serve it until they end.

    Args:
        source: makes the source of events of one open page.
        token: gives access to the page.
        port: 0 for a free one. Raises SetupError if it is taken.
        lookout: polls the peers' statuses.
        deeds: the actions of its buttons, by name; the page shows no other buttons.
        about: further fields of `/about`, which the page reads.
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
        self.url = f"http://127.0.0.1:{self.port}/?token={token}"
        app = Starlette(routes=self._routes())
        config = uvicorn.Config(
            Guard(app, self.port, token), lifespan="off", ws="none", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=1, timeout_keep_alive=60,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self, tell: Callable[[], None]) -> None:
        """Serve the page until SIGINT or SIGTERM; `tell` is called once the page can be opened."""

        def end(*_: object) -> None:
            self._server.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)  # uvicorn re-raises the signal that it caught
        # At the end, uvicorn cuts off pages that do not read, and logs that.
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
                await asyncio.sleep(0.25 if is_all else 0)

    async def _do(self, request: Request) -> Response:
        deed = self._deeds.get(request.path_params["deed"])
        if deed is None:
            return JSONResponse({"message": "This page does not offer that.", "hint": ""}, 404)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 10_000:
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
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    kind = kinds.get(path.suffix, "text/plain")

    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return Route("/" if path.name == "index.html" else f"/{path.name}", answer)


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of the loopback address; raise SetupError if it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise SetupError(
            f"Port {port} of this machine cannot be used: {error.strerror}.",
            hint="name another, or let one be chosen: --port 0",
        ) from error
    listener.listen()
    return listener
