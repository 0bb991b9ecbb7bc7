"""ZooKeeper sessions, before any server has answered."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.store_url import StoreUrl
from celery_singleton_lock.stores.zookeeper.ensemble import Ensemble
from celery_singleton_lock.stores.zookeeper.sessions import Session
from example_project.private_server import free_port


def test_a_session_whose_threads_could_not_be_started_is_started_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = StoreUrl.parse(f"zk://127.0.0.1:{free_port()}", port=2181)
    clock = SystemClock()
    session = Session(url, 10.0, clock)

    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError):
            session.start(clock.now() + 0.05)
    assert not session.client.handler.running
    with pytest.raises(StoreUnavailable):  # no server listens there
        session.start(clock.now() + 0.05)
    assert session.client.handler.running
    session.close()


def test_spare_sessions_are_ended_once_however_many_threads_find_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = StoreUrl.parse(f"zk://127.0.0.1:{free_port()}", port=2181)
    clock = SystemClock()
    ended: list[Session] = []
    close = Session.close

    def note_end(session: Session) -> None:
        ended.append(session)
        close(session)

    monkeypatch.setattr(Session, "close", note_end)
    ensemble = Ensemble(url, clock, 0, lambda session: False)

    def use(ttl: int) -> None:
        # No server listens there.
        with pytest.raises(StoreUnavailable), ensemble.using(ttl, clock.now()):
            pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(10, 30)))
    use(30)
    left = list(ensemble._sessions.values())
    assert len(left) == 8
    assert len(ended) == len(set(ended)) == 21 - 8
    ensemble.close()
