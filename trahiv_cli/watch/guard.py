"""Access control of the page: only its user's browser may read it, and only at the page's own address."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trahiv_cli.errors import SetupError
from trahiv_cli.files import require_private, write_private

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Refuses requests to other hosts, from other origins or without the token, before `app` sees them.

    The first request brings the token in its URL, and gets a cookie for it. The cookie's name has the port in
    it, because browsers send cookies to all ports of a machine.
    """

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = f"trahiv-{port}"
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the app."""

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
            # Not "strict": the first page is opened from a file.
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return answer
        return PlainTextResponse("To see this page, open the address that `trahiv watch` printed.", 403)

    def _is_token(self, text: str | None) -> bool:
        return text is not None and hmac.compare_digest(text.encode(), self._token.encode())


def kept_token(folder: Path) -> str:
    """Return the token of a folder; an open page can still use it after a restart of `trahiv watch`.

    Raises SetupError if it can't be stored there, or is readable by other users.
    """
    path = folder / "watch.key"
    try:
        if not path.exists() or path.stat().st_size < 20:  # it is damaged
            write_private(path, new_token().encode())
        require_private(path)
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise SetupError(
            f"The page's key {path} cannot be used: {error.strerror}.", hint="make its folder yours"
        ) from error


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(24)
