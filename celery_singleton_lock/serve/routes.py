"""The paths of the server, and what each answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from .. import inspection
from ..errors import SingletonLockError
from ..inspection import HeldKey, SortBy
from ..inspection.keys import SORT_KEYS
from ..runtime import Runtime
from .access import Access
from .http import Request, Response
from .listener import Listener
from .readings import BEAT, Reading, Readings

logger = logging.getLogger("celery_singleton_lock")

# Rows of one page. With more, a browser is slow, and a person searches.
_MOST_ROWS: Final = 200
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
#: The path for probes.
HEALTH: Final = "/healthz"
#: The path for scrapes.
METRICS: Final = "/metrics"
#: What the page can be restricted to.
_SHOWN: Final[Mapping[str, Callable[[HeldKey], bool]]] = {
    "": lambda key: True,
    "held": lambda key: not (key.is_claim or key.is_free),
    "waiting": lambda key: bool(key.waiting or key.calls),
    "claimed": lambda key: key.is_claim,
}


class Site:
    """Answers requests.

    Args:
        readings: The readings of the app.
        listener: The receiver of worker events.
        registry: The metrics.
        access: What is allowed.
    """

    def __init__(
        self, readings: Readings, listener: Listener, registry: CollectorRegistry, access: Access
    ) -> None:
        self._app, self._readings, self._listener = readings.app, readings, listener
        self._registry, self._access = registry, access
        folder = files(__package__) / "static"
        self._files = {
            path: Response(body=(folder / name).read_bytes(), content_type=content_type)
            for path, (name, content_type) in _FILES.items()
        }
        self._paths: dict[str, Callable[[Request], Response]] = {
            "/api/state": self._state,
            "/api/explain": self._explain,
            HEALTH: self._health,
            METRICS: self._metrics,
            **dict.fromkeys(_FILES, lambda request: self._files[request.path]),
        }

    def answer(self, request: Request) -> Response:
        """The response to a request."""
        if request.path == "/api/release":
            return self._access.refuse_release(request) or self._release(request)
        found = self._paths.get(request.path)
        if found is None:
            return Response.text("there is no such page", 404)
        return self._access.refuse_read(request) or found(request)

    def _metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(body=encode(self._registry), content_type=content_type)

    def _health(self, request: Request) -> Response:
        errors = {"store": self._readings.outage.get(), "broker": self._listener.error}
        report = {name: error or "ok" for name, error in errors.items()}
        return Response.json(report, 503 if any(errors.values()) else 200)

    def _state(self, request: Request) -> Response:
        """The part of the state that the page shows."""
        reading, settings = self._readings.keys.get(), Runtime.of(self._app).settings
        leader = reading.leader(settings.beat_name)
        matching, can_release = _matching(reading, request.query), bool(self._access.options.token)
        rows = [_row(key, reading) for key in matching[:_MOST_ROWS]]
        if not can_release:
            for row in rows:
                del row["token"]  # of no use to a reader
        return Response.json(
            {
                "app": self._app.main or "",
                "at": reading.at.isoformat(),
                "store": {"url": settings.safe_url, "error": reading.error},
                "broker": {"error": self._listener.error, "received": self._listener.received},
                "beat": {"name": settings.beat_name, "leader": leader and _row(leader, reading)},
                "counts": _counts(reading),
                "matching": len(matching),
                "keys": rows,
                "pauses": [str(one) for one in reading.pauses],
                "findings": [asdict(finding) for finding in self._readings.findings],
                "can_release": can_release,
            }
        )

    def _explain(self, request: Request) -> Response:
        """Why a task ran, did not run, or has not run yet."""
        task_id = request.query.get("task", "").strip()
        if not task_id:
            return Response.text("give the id of a task: ?task=...", 400)
        try:
            found = inspection.explain(self._app, task_id)
        except SingletonLockError as exc:
            return Response.text(f"not known: {exc}", 503)
        return Response.json({"task_id": task_id, "fate": found.fate, "sentences": found.sentences})

    def _release(self, request: Request) -> Response:
        """Release a key from the holder that the operator has seen and confirmed."""
        try:
            wanted = json.loads(request.body)
            key, token, user, reason = (
                _text(wanted, name) for name in ("key", "token", "user", "reason")
            )
        except (ValueError, TypeError) as exc:
            return Response.text(f"not released: {exc}", 400)
        if not (key and token and user):
            return Response.text("not released: give key, token (the holder's) and user", 400)
        try:
            released = inspection.release(self._app, key, token, user=user, reason=reason)
        except SingletonLockError as exc:
            return Response.text(f"not released: {exc}", 503)
        logger.warning(
            "singleton serve: %s of %r, by %r from %s: %r",
            "release" if released else "no release",
            *(key, user, request.client, reason),
        )
        self._readings.keys.forget()
        return Response.json({"released": released})


def _matching(reading: Reading, query: Mapping[str, str]) -> list[HeldKey]:
    """The keys that the page asks for, in its order."""
    wanted = query.get("q", "").strip().lower()
    shown = _SHOWN.get(query.get("show", ""), _SHOWN[""])
    found = [
        key
        for key, text in zip(reading.keys, reading.texts, strict=True)
        if wanted in text and shown(key)
    ]
    sort = query.get("sort", "")
    return sorted(found, key=SORT_KEYS[SortBy(sort) if sort in {*SortBy} else SortBy.AGE])


def _counts(reading: Reading) -> dict[str, int | None]:
    """The numbers at the top of the page; None: unknown."""
    shown = {name: [*filter(is_shown, reading.keys)] for name, is_shown in _SHOWN.items()}
    waiting = [key.waiting for key in reading.keys if not key.is_free]
    known = [count for count in waiting if count is not None]
    calls = sum(key.calls or 0 for key in reading.keys)
    return {
        "all": len(reading.keys),
        "held": len(shown["held"]),
        "claimed": len(shown["claimed"]),
        "waiting": calls + sum(known) if calls or len(known) == len(waiting) else None,
    }


def _row(key: HeldKey, reading: Reading) -> dict[str, Any]:
    return {
        "key": key.key,
        "name": key.key.partition("}:")[2] or key.key,
        "state": key.state,
        "task": key.task,
        "task_id": key.task_id,
        "worker": key.worker,
        "pid": key.pid,
        "age": round(reading.age(key), 1) if key.since else None,
        "ttl": round(key.ttl, 1),
        "fence": key.fence,
        "token": key.token,
        "waiting": key.waiting,
        "calls": key.calls,
        "is_claim": key.is_claim,
        "is_free": key.is_free,
        "is_beat": key.task == BEAT,
    }


def _text(wanted: Any, name: str) -> str:
    value = wanted.get(name, "") if isinstance(wanted, dict) else None
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, in a JSON object")
    return value.strip() if name in ("user", "reason") else value
