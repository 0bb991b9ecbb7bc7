"""ZooKeeper sessions, before any server has answered."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.urls import StoreUrl
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


def test_a_spare_session_that_two_threads_find_is_ended_by_one() -> None:
    url = StoreUrl.parse(f"zk://127.0.0.1:{free_port()}", port=2181)
    clock = SystemClock()
    asked: list[Session] = []

    def is_used(session: Session) -> bool:
        asked.append(session)
        if len(asked) == 1:  # the other thread comes now
            ensemble._close_spare(list(ensemble._sessions.values())[-1])
        return False

    ensemble = Ensemble(url, clock, 0, is_used)
    for ttl in range(10, 19):
        assert not asked
        with pytest.raises(StoreUnavailable):  # no server listens there
            ensemble.session(clock.now(), ttl)
    left = list(ensemble._sessions.values())
    ensemble.close()
    assert asked
    assert len(left) == 8
