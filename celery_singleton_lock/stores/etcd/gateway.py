"""Calls to an etcd cluster through its HTTP gateway: endpoints, failover, login.

Promises
    A call ends within its time, give or take the last byte. A member that refuses the connection is
    passed over for the next one, within the same call. What may have been carried out is sent again
    only if that does no harm (``repeatable``); else the caller hears that nobody knows.

A client on which anything went wrong, were it an exception thrown into the thread between send and
read, is closed and never used again. Idle ones are kept per native thread under gevent, where a
socket belongs to a thread's hub.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import requests
from etcd3gw import exceptions
from etcd3gw.client import Etcd3Client
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.endpoints import ClusterUrl

__all__ = ["OPTIONS", "Gateway", "LeaseGone"]

#: What the URL's query may say.
OPTIONS: Final = frozenset({"ca", "cert", "key", "api_path"})

_TLS_SCHEME: Final = "etcds"
_MIN_TIMEOUT: Final = 0.01
# Seconds after which an idle connection is closed instead of used. NATs and load balancers drop
# idle connections without notice; the shortest common timeout is 240 s.
_MAX_IDLE: Final = 60.0
# gRPC's codes, as the gateway tells them.
_NOT_FOUND: Final = 5
_UNAUTHENTICATED: Final = 16
# Unknown, deadline exceeded, aborted, internal, unavailable: no leader, a leader that has changed,
# a proposal that was dropped. Whether anything was done isn't known.
_UNCERTAIN: Final = frozenset({2, 4, 10, 13, 14})
# How a member tells that a token of the login has expired, or is of before its restart.
_BAD_TOKEN: Final = ("invalid auth token", "user name is empty", "auth store is old")


class LeaseGone(Exception):
    """The etcd lease that a key was to be bound to is no more."""


class Gateway:
    """The cluster that ``url`` names.

    Args:
        url: With its members, login and options.
        clock: Of deadlines.
    """

    def __init__(self, url: ClusterUrl, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._member = 0  # the one that answered last
        self._token = ""
        self._idle: dict[tuple[int, int, int], deque[Any]] = {}

    def call(
        self, path: str, body: Mapping[str, Any], deadline: float, *, repeatable: bool
    ) -> dict[str, Any]:
        """POST ``body`` to ``path``; the reply.

        Args:
            path: Behind the version, as ``kv/txn``.
            body: JSON, with keys and values in base64.
            deadline: On the clock.
            repeatable: Whether it may be sent again though it may have been carried out.

        Raises:
            LeaseGone: It names an etcd lease that has expired.
            StoreUnavailable, StoreError: No answer; a refusal.
        """
        members = len(self._url.hosts)
        logged_in_again = False
        for tries_left in range(members, -1, -1):
            member = self._member
            try:
                return self._send(member, path, body, deadline, tries_left or 1)
            except _Failure as exc:
                if exc.code == _UNAUTHENTICATED and self._url.username and not logged_in_again:
                    logged_in_again, self._token = True, ""
                    continue
                if exc.is_refusal:
                    raise self._refusal(exc) from exc.__cause__
                # The next call tries the next member, whatever becomes of this one.
                self._member = (member + 1) % members
                may_repeat = repeatable or not exc.was_sent
                if not may_repeat or tries_left <= 1 or self._clock.now() >= deadline:
                    raise StoreUnavailable(f"the store doesn't answer: {exc}") from exc.__cause__
        raise StoreUnavailable("the store doesn't answer: no member did")

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            for client, _ in self._idle.popitem()[1]:
                client.session.close()

    def _send(
        self, member: int, path: str, body: Mapping[str, Any], deadline: float, tries_left: int
    ) -> dict[str, Any]:
        left = max(deadline - self._clock.now(), _MIN_TIMEOUT)
        # A host that swallows packets must leave time for the others.
        timeout = (left / tries_left, left)
        headers = {}
        if self._url.username:
            self._token = self._token or self._log_in(member, timeout)
            headers["Authorization"] = self._token
        return self._post(member, path, body, timeout, headers)

    def _log_in(self, member: int, timeout: tuple[float, float]) -> str:
        body = {"name": self._url.username, "password": self._url.password}
        try:
            return str(self._post(member, "auth/authenticate", body, timeout, {})["token"])
        except _Failure as exc:
            if exc.is_refusal:
                raise StoreError(f"the store refuses the login: {exc}") from exc.__cause__
            raise _Failure(str(exc), was_sent=False) from exc.__cause__

    def _post(
        self,
        member: int,
        path: str,
        body: Mapping[str, Any],
        timeout: tuple[float, float],
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        thread = native.socket_owner()
        idle = self._idle.setdefault((os.getpid(), thread, member), deque())
        try:
            client, idle_since = idle.pop()
            if self._clock.now() - idle_since > _MAX_IDLE:
                client.session.close()
                client = self._new_client(member)
        except IndexError:
            client = self._new_client(member)
        clean = False
        try:
            client.timeout = timeout
            reply: dict[str, Any] = client.post(client.get_url(path), json=body, headers=headers)
            clean = True
            return reply
        except exceptions.Etcd3Exception as exc:
            failure = _failure(exc)
            clean = failure.is_refusal
            raise failure from exc
        except (OSError, ValueError) as exc:
            # requests' own are an OSError, and so is a certificate's file that isn't there.
            raise _Failure(str(exc), was_sent=True) from exc
        finally:
            if clean:
                idle.append((client, self._clock.now()))
            else:
                client.session.close()

    def _new_client(self, member: int) -> Any:
        host, port = self._url.hosts[member]
        options = self._url.options
        session = requests.Session()
        # A proxy or a .netrc is for the web; reading the latter costs as much as a call.
        session.trust_env = False
        session.verify = options.get("ca", True)
        if "cert" in options:
            session.cert = (options["cert"], options.get("key", options["cert"]))
        return Etcd3Client(
            host=host,
            port=port,
            protocol="https" if self._url.scheme == _TLS_SCHEME else "http",
            api_path=options.get("api_path", "/v3/"),
            session=session,
        )

    def _refusal(self, failure: _Failure) -> Exception:
        if failure.code == _NOT_FOUND and "lease" in str(failure):
            return LeaseGone(str(failure))
        return StoreError(f"the store refuses: {failure}")


class _Failure(Exception):
    """A call that failed.

    Attributes:
        was_sent: Whether it may have been carried out.
        code: gRPC's; None where no member answered.
    """

    def __init__(self, message: str, *, was_sent: bool, code: int | None = None) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.code = code

    @property
    def is_refusal(self) -> bool:
        return self.code is not None and self.code not in _UNCERTAIN


def _failure(exc: Any) -> _Failure:
    """What etcd3gw's exception tells; it keeps the cause of a broken connection as its context."""
    if isinstance(exc, (exceptions.ConnectionFailedError, exceptions.ConnectionTimeoutError)):
        cause = exc.__context__
        if cause is not None:
            reason = getattr(cause.args[0] if cause.args else None, "reason", cause)
            never_sent = isinstance(reason, (NewConnectionError, ConnectTimeoutError))
            return _Failure(str(cause), was_sent=not never_sent)
    text = exc.detail_text or str(exc)
    try:
        answer = json.loads(text)
        message, code = str(answer["error"]), int(answer["code"])
    except (ValueError, TypeError, KeyError):
        return _Failure(text[:200], was_sent=True)  # a proxy's page, say
    if any(sign in message for sign in _BAD_TOKEN):
        code = _UNAUTHENTICATED
    return _Failure(message, was_sent=True, code=code)
