"""Requests and responses as values, and the ASGI application around a function of both."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import parse_qs

from ..core.executor import Executor
from .protocol import SURPLUS

logger = logging.getLogger("celery_singleton_lock")

# Bytes. The only request with a body is a release.
_MAX_BODY: Final = 20_000
# Requests that are answered at once; each may wait for the store.
_MOST_REQUESTS: Final = 8
#: Headers of every response. Scripts and styles come from files of this server only, and the page's
#: script can't parse text as HTML.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request.

    Attributes:
        method: GET, POST or another.
        path: The decoded path.
        query: The first value of each parameter.
        headers: Names in lower case. A header that was sent twice is joined by a comma.
        body: The body.
        client: The address of the peer.
    """

    method: str = "GET"
    path: str = "/"
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response, without the headers that all responses have."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, text: str, status: int = 200, **headers: str) -> Response:
        return cls(body=f"{text}\n".encode(errors="replace"), status=status, headers=headers)

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Response:
        return cls(body=json.dumps(value).encode(), status=status, content_type="application/json")


_LAST: Final = {"Connection": "close"}
_TOO_MANY: Final = Response.text(
    "your address has as many connections to this server as it may; see --max-connections",
    503,
    **_LAST,
)


class Application:
    """An ASGI application that answers each request by a function, on a thread.

    Args:
        answer: The function.
        quick: The paths that are answered on a thread of their own, because the others may all
            wait for the store.
        exempt: The paths that are answered on a surplus connection (`protocol`).
    """

    def __init__(
        self,
        answer: Callable[[Request], Response],
        quick: Collection[str] = (),
        exempt: Collection[str] = (),
    ) -> None:
        self._answer, self._quick, self._exempt = answer, quick, exempt
        self._threads, self._quick_thread = Executor(_MOST_REQUESTS, "serve"), Executor(1, "probe")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_surplus = (scope.get("state") or {}).get(SURPLUS)
        if is_surplus and scope["path"] not in self._exempt:
            await _send(_TOO_MANY, scope["method"] == "HEAD", send)
            return
        body = await _body_of(receive)
        if body is None:
            response = Response.text("the body is too long", 413, Connection="close")
        else:
            threads = self._quick_thread if scope["path"] in self._quick else self._threads
            response = await threads.run(self._safely, _request(scope, body))
            if is_surplus:
                response = replace(response, headers={**response.headers, **_LAST})
        await _send(response, scope["method"] == "HEAD", send)

    def _safely(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except Exception:
            logger.exception("singleton serve: %s %s failed", request.method, request.path)
            return Response.text("an error of the server; see its log", 500)


def _request(scope: Scope, body: bytes) -> Request:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20)
    return Request(
        method=scope["method"],
        path=scope["path"],
        query={name: values[0] for name, values in query.items()},
        headers=headers,
        body=body,
        client=(scope.get("client") or ("",))[0],
    )


async def _body_of(receive: Receive) -> bytes | None:
    """The body; None: it is too long, or the connection ended before it was complete."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _MAX_BODY:
            return None
    return body


async def _send(response: Response, is_head: bool, send: Send) -> None:
    length = {"Content-Type": response.content_type, "Content-Length": str(len(response.body))}
    headers = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in {**_HEADERS, **response.headers, **length}.items()
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if is_head else response.body
    await send({"type": "http.response.body", "body": body})
