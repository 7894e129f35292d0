"""The page may be read by the browser of whoever started it, and from its own address alone."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.files import require_private, write_private

KEY_FILE = "watch.key"
MIN_TOKEN = 20  # characters
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Refuses other hosts and origins, and whoever does not bring the token, before `app` sees a request.

    The first page brings the token in its address and gets a cookie for it: other ports of this machine have
    cookies of other names.
    """

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = f"trahiv-{port}"
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._answer(Request(scope)) or self._app
        await app(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return PlainTextResponse(f"This page is only at http://{self._hosts[0]}/.", 421)
        if request.method == "POST" and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse("Only the page itself may ask for this.", 403)
        if self._is_token(request.cookies.get(self._cookie)):
            return RedirectResponse("/", 303) if "token" in request.query_params else None
        if request.method == "GET" and self._is_token(request.query_params.get("token")):
            answer = RedirectResponse("/", 303)
            # Not "strict": the first page is opened by a file.
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return answer
        return PlainTextResponse("To see this page, open the address that `trahiv watch` printed.", 403)

    def _is_token(self, text: str | None) -> bool:
        return text is not None and hmac.compare_digest(text.encode(), self._token.encode())


def kept_token(folder: Path) -> str:
    """Return the token of a folder, which an open page still has when `trahiv watch` is started again.

    SetupError if it cannot be kept there, or others can read it.
    """
    path = folder / KEY_FILE
    try:
        if not path.exists() or path.stat().st_size < MIN_TOKEN:  # it is damaged
            write_private(path, new_token().encode())
        require_private(path)
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise SetupError(
            f"The page's key {path} cannot be used: {error.strerror}.", hint="make its folder yours"
        ) from error


def new_token() -> str:
    """Make a token that nobody can guess."""
    return secrets.token_urlsafe(24)
