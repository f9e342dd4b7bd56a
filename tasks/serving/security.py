"""Who may talk to the server: a bearer token, TLS, and no web pages."""

from __future__ import annotations

import hmac
import ssl
from os.path import expanduser

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from accel.errors import ConfigError

PROBES = ("/healthz", "/readyz")
SCHEMES = ("bearer", "api-key")  # openpi-client sends its key with the second


class Guard:
    """ASGI middleware that answers 401 without the token and 403 to web pages.

    token: `None` lets everyone in. Probes need no token. A request with an `Origin` header comes from a
    page in a browser, which may reach a server on this machine although its author may not.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if status is None:
            await self._app(scope, receive, send)
            return
        text = "send the token: Authorization: Bearer ...\n" if status == 401 else "no web pages\n"
        response = PlainTextResponse(text, status_code=status)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> int | None:
        headers = Headers(scope=scope)
        if "origin" in headers:
            return 403
        if self._token is None or scope["path"] in PROBES:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode())
        return None if known and scheme.lower() in SCHEMES else 401


def check_tls(certificate: str, key: str) -> None:
    """Load both PEM files once, so that mistakes show before weights are read. Raises: ConfigError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            expanduser(certificate),
            expanduser(key),
            password=_no_password,
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"task.tls_certificate={certificate}, task.tls_key={key}: not a certificate and its key "
            f"({error.strerror if isinstance(error, OSError) else error})."
        ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
