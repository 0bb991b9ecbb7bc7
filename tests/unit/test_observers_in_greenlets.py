"""Where gevent or eventlet has patched threads, observers run in greenlets of the bodies' hub."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.harness.processes import ROOT, TIMEOUT

_BEGINNING = """
    import sys
    if sys.argv[1] == "gevent":
        import gevent.monkey; gevent.monkey.patch_all()
    else:
        import eventlet; eventlet.monkey_patch()
    import logging, os, time
    from celery_singleton_lock.core import native_threads, observers
    from celery_singleton_lock.core.observers import Observer, elsewhere

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    hub, seen = native_threads.original("get_ident")(), []

    def note(event):
        time.sleep(0.1)
        seen.append((event, native_threads.original("get_ident")() == hub))

    def emit(observer, *events):
        '''As the heartbeat's native thread does.'''
        ended = native_threads.inbox()
        def run():
            with elsewhere():
                for event in events:
                    observer(event)
            ended.put(None)
        native_threads.start_new_thread(run, "heartbeat")
        ended.get(timeout=30)

    observer = Observer(note, "singleton-test")
"""

in_either = pytest.mark.parametrize(
    "library", ["gevent", pytest.param("eventlet", marks=pytest.mark.slow)]
)


def output_of(library: str, program: str) -> str:
    """What it prints, in a process of its own: patches can't be undone."""
    pytest.importorskip(library)
    text = textwrap.dedent(_BEGINNING) + textwrap.dedent(program)
    command = [sys.executable, "-W", "ignore", "-c", text, library]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_either
def test_an_observer_of_a_native_thread_runs_in_the_bodies_hub_and_in_order(library: str) -> None:
    program = """
        for _ in range(2):  # its greenlet ends between the two
            emit(observer, 1, 2)
            observer("body")  # it does not overtake them
            assert seen == [], seen
            observer.flush(30)
            assert seen == [(1, True), (2, True), ("body", True)], seen
            seen.clear()
    """
    output_of(library, program)


@in_either
def test_a_busy_hub_gets_one_greenlet_for_many_events(library: str) -> None:
    program = """
        starts, start = [], native_threads.start_beside_bodies
        native_threads.start_beside_bodies = lambda *args: (starts.append(1), start(*args))
        ended = []

        def lose_many():
            with elsewhere():
                for number in range(1000):
                    observer(number)
            ended.append(1)

        observer = Observer(seen.append, "singleton-test")
        observers._START_PATIENCE = 60.0
        native_threads.start_new_thread(lose_many, "heartbeat")
        while not ended:
            pass  # this greenlet does not yield
        assert len(starts) == 1, starts
        observer.flush(30)
        assert seen == [*range(1000)]
    """
    output_of(library, program)


@in_either
def test_a_greenlet_serves_others_and_its_neighbours_do_not(library: str) -> None:
    program = """
        import threading
        inside, gate = threading.Event(), threading.Event()

        def serve():
            with elsewhere():
                inside.set()
                gate.wait()

        threading.Thread(target=serve).start()
        inside.wait()
        observer("body")
        assert seen == [("body", True)], seen
        gate.set()
    """
    output_of(library, program)


@in_either
def test_what_blocks_there_is_named(library: str) -> None:
    program = """
        observers.SLOW = 0.2
        gate = native_threads.inbox()
        emit(Observer(lambda event: gate.get(timeout=30), "singleton-slow"), 1, 2)
        time.sleep(1)
        gate.put(None), gate.put(None)
    """
    assert output_of(library, program).count("<lambda> has run for 0.2 s") == 1


@in_either
def test_the_end_of_the_process_waits_for_it_and_a_forked_child_has_an_empty_queue(
    library: str,
) -> None:
    program = """
        def show(event):
            time.sleep(0.1)
            print(event, flush=True)

        observer = Observer(show, "singleton-test")
        emit(observer, "first", "second")
        time.sleep(0.05)
        if not (child := os.fork()):
            observer("child")
            time.sleep(0.5)  # a copy of the greenlet goes on with the first event, and ends
            os._exit(0)
        os.waitpid(child, 0)
    """
    printed = output_of(library, program).split()
    assert (printed.count("second"), printed.count("child")) == (1, 1)


@in_either
def test_the_result_of_a_lost_call_is_stored_in_the_bodies_hub(library: str) -> None:
    """Celery calls the error callbacks of the call there, which are code of the user."""
    program = """
        from celery import Celery
        from celery_singleton_lock.key_queue.sweep import QueueSweep

        look, found = QueueSweep(Celery(broker="memory://"), None, None), native_threads.inbox()
        ask = lambda: native_threads.original("get_ident")() == hub
        native_threads.start_new_thread(lambda: found.put(look._within(ask)), "look")
        assert found.get(timeout=30)
    """
    output_of(library, program)
