"""The URL of one server, in the forms that users have."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

__all__ = ["connection_url"]

# Valkey speaks Redis' protocol; redis-py reads only the names that Redis has.
_AS_REDIS: Final = {"valkey": "redis", "valkeys": "rediss"}


def connection_url(url: str) -> str:
    """The form redis-py reads, of a URL in Celery's or kombu's form.

    ``redis+socket:///path?virtual_host=1`` is kombu's for a unix socket; the ssl module's names of
    ``ssl_cert_reqs`` are Celery's; ``valkey://`` and ``valkeys://`` are read as Redis' own names.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    parts = parts._replace(scheme=_AS_REDIS.get(parts.scheme, parts.scheme))
    if parts.scheme == "redis+socket":
        db = query.pop("virtual_host", "") or query.pop("db", "") or "0"
        query["db"] = db.strip("/")
        parts = parts._replace(scheme="unix", path=unquote(parts.path))
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    # Not geturl(): it drops the // of a unix:// URL, which has no host.
    suffix = f"?{urlencode(query)}" if query else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{suffix}"
