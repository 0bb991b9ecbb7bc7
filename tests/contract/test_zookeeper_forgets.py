"""A member that forgets a request until another one comes, as ZooKeeper 3.6.0 to 3.8.0 does.

ZOOKEEPER-4537: a commit that arrives just when the thread that applies them goes to sleep wakes
nobody. It takes thousands of writes to meet that, so here the last step of it is provoked: a real
member, behind a way that keeps each reply back until the client sends something more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Self

import pytest

from celery_singleton_lock.core.store import Granted, Release, Released
from celery_singleton_lock.stores.zookeeper import ZooKeeperStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from tests.harness.zookeeper import ZooKeeperEnsemble

pytestmark = pytest.mark.slow

_CHUNK_BYTES = 1 << 16


class ForgetfulWay:
    """Leads to a member; once `forgets` is set, no reply passes before the next request.

    Args:
        target: The member's port on 127.0.0.1.
    """

    def __init__(self, target: int) -> None:
        self.forgets = threading.Event()
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listening.getsockname()[1])

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listening.accept()
                member = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, member]
                asked = threading.Semaphore(0)
                for carry in (self._requests, self._replies):
                    threading.Thread(target=carry, args=(client, member, asked)).start()

    def _requests(
        self, client: socket.socket, member: socket.socket, asked: threading.Semaphore
    ) -> None:
        for data in _chunks(client):
            member.sendall(data)
            asked.release()
        asked.release()  # nothing more is asked for
        _end(member)

    def _replies(
        self, client: socket.socket, member: socket.socket, asked: threading.Semaphore
    ) -> None:
        for data in _chunks(member):
            if self.forgets.is_set():
                while asked.acquire(blocking=False):
                    pass  # what was asked before this reply
                asked.acquire()
            with suppress(OSError):
                client.sendall(data)
        _end(client)


def _chunks(source: socket.socket) -> Iterator[bytes]:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            yield data


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def test_a_forgotten_request_is_answered_behind_the_next_one(zookeeper: ZooKeeperEnsemble) -> None:
    """A session of 600 s sends its own next ping after 200 s."""
    with (
        ForgetfulWay(zookeeper.ports[0]) as way,
        closing(ZooKeeperStore(f"zk://127.0.0.1:{way.port}/forgets")) as store,
    ):
        key, token = new_key(), new_token()
        for first in (True, False):
            assert isinstance(ask(store, key, token), Granted)
            call = Release(keys=(key,), token=token)
            assert store.release(call, timeout=TIMEOUT) is Released.RELEASED
            if first:  # connections and buckets are made
                way.forgets.set()
        way.forgets.clear()
