"""The right to read, and the right to release.

Reading
    A page of another site can make a browser send requests to this server, but can't read the
    replies. It could if its own name resolved to this server's address (DNS rebinding). The browser
    then sends the other site's name as Host, and such a request is refused.

Releasing
    A request needs the token in the header Authorization. Browsers add that header only for a
    script of the same origin; no cookie is used, so another site can't make a browser release
    anything. The Origin is compared too.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from urllib.parse import urlsplit

from .http import Request, Response
from .options import Options, is_ip

logger = logging.getLogger("celery_singleton_lock")


@dataclass(frozen=True, slots=True)
class Access:
    """What a server with these options allows."""

    options: Options

    def refuse_read(self, request: Request) -> Response | None:
        """The refusal of a request to read; None: it is allowed."""
        if request.method not in ("GET", "HEAD"):
            return Response.text("only GET is allowed here", 405, Allow="GET, HEAD")
        return self.refuse_host(request)

    def refuse_host(self, request: Request) -> Response | None:
        """The refusal of a request that addresses the server by an unknown name."""
        host = _host_of(f"//{request.headers.get('host', '')}")
        allowed = {"localhost", self.options.host, *self.options.allowed_hosts}
        # A name is needed for DNS rebinding, so an address is always safe.
        if host and (is_ip(host) or host in {name.lower() for name in allowed}):
            return None
        return Response.text(
            f"this server is not called {host!r}; if it is, start it with --allowed-host", 421
        )

    def refuse_release(self, request: Request) -> Response | None:
        """The refusal of a request to release a key; None: it is allowed."""
        if not self.options.token:
            return Response.text("this page is read-only: the server has no --token-file", 403)
        if request.method != "POST":
            return Response.text("only POST is allowed here", 405, Allow="POST")
        if refusal := self.refuse_host(request):
            return refusal
        headers = request.headers
        origin = headers.get("origin")
        # Schemes may differ: a proxy in front of this server may speak TLS.
        is_foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
        if is_foreign or headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return Response.text(
                "a release must come from this server's own page; a proxy before it must pass the "
                "browser's Host header",
                403,
            )
        if headers.get("content-type", "").partition(";")[0] != "application/json":
            return Response.text("a release must be application/json", 415)
        kind, _, token = headers.get("authorization", "").partition(" ")
        expected = self.options.token.encode()
        if kind != "Bearer" or not hmac.compare_digest(token.encode(), expected):
            logger.warning("singleton serve: a release with a wrong token, from %s", request.client)
            return Response.text("wrong token", 401, **{"WWW-Authenticate": "Bearer"})
        return None


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # a malformed IPv6 address
        return ""
