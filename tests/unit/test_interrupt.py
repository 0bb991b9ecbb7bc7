"""Ending a body from another thread: where it sleeps, waits or loops, and never after it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from celery_singleton_lock.task import interrupt as interrupt_module
from celery_singleton_lock.task.interrupt import Body, LeaseInterrupt

#: Seconds after which a body that should have been ended ends by itself, and the test fails.
LONG = 5.0


def sleep(started: threading.Event) -> None:
    started.set()
    time.sleep(LONG)


def read_a_socket(started: threading.Event) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(LONG)
        started.set()
        left.recv(1)


def read_a_blocking_socket(started: threading.Event) -> None:
    left, right = socket.socketpair()
    with left, right:
        started.set()
        left.recv(1)


def select_nothing(started: threading.Event) -> None:
    started.set()
    select.select([], [], [], LONG)


def wait_for_a_lock(started: threading.Event) -> None:
    lock = threading.Lock()
    lock.acquire()
    started.set()
    lock.acquire(timeout=LONG)


def wait_for_a_process(started: threading.Event) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"])
    try:
        started.set()
        process.wait()
    finally:
        process.kill()
        process.wait()


def loop(started: threading.Event) -> None:
    started.set()
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        pass


def swallow_exceptions(started: threading.Event) -> None:
    started.set()
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def interrupted_once_started(body: Body, started: threading.Event) -> threading.Thread:
    def interrupt() -> None:
        started.wait(LONG)
        body.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "function",
    [
        sleep,
        read_a_socket,
        read_a_blocking_socket,
        select_nothing,
        wait_for_a_lock,
        wait_for_a_process,
        loop,
        swallow_exceptions,
    ],
)
def test_a_body_on_the_main_thread_is_ended_at_once(function: Callable[..., None]) -> None:
    body, started = Body(), threading.Event()
    thread = interrupted_once_started(body, started)
    before = time.monotonic()
    with pytest.raises(LeaseInterrupt):
        body.run(lambda: function(started))
    assert time.monotonic() - before < LONG / 2
    assert body.fired
    thread.join()


def test_an_undisturbed_body_returns_and_raises_as_it_likes() -> None:
    assert Body().run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        Body().run(lambda: 1 // 0)


def test_a_body_lost_before_its_first_instruction_does_not_run() -> None:
    body = Body()
    body.interrupt()
    with pytest.raises(LeaseInterrupt):
        body.run(lambda: pytest.fail("it ran"))


def test_a_body_lost_after_its_last_instruction_is_left_alone() -> None:
    body = Body()
    assert body.run(lambda: 1) == 1
    body.interrupt()
    time.sleep(0)  # a signal on its way would be handled here
    assert body.fired


def test_a_signal_from_elsewhere_ends_nothing() -> None:
    body = Body()
    assert body.run(lambda: signal.raise_signal(interrupt_module._SIGNAL) or 7) == 7


@pytest.fixture
def signal_of_others() -> Iterator[int]:
    """The signal without this library's handler, as before the first body of a process."""
    before = signal.signal(interrupt_module._SIGNAL, signal.SIG_DFL)
    yield interrupt_module._SIGNAL
    signal.signal(interrupt_module._SIGNAL, before)


def test_a_body_is_ended_where_a_profiler_has_replaced_the_function_that_sets_handlers(
    signal_of_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = signal.signal

    def replaced(number: int, handler: Any) -> Any:
        # As Scalene's, which wants a name of each signal: 45 has none.
        return original(signal.Signals(number), handler)

    monkeypatch.setattr(signal, "signal", replaced)
    with pytest.raises(ValueError, match="is not a valid Signals"):
        signal.signal(signal_of_others, signal.SIG_DFL)
    body, started = Body(), threading.Event()
    thread = interrupted_once_started(body, started)
    with pytest.raises(LeaseInterrupt):
        body.run(lambda: sleep(started))
    thread.join()


def test_a_handler_that_was_there_before_the_body_is_replaced(signal_of_others: int) -> None:
    signal.signal(signal_of_others, lambda *_: pytest.fail("it was called"))
    body, started = Body(), threading.Event()
    thread = interrupted_once_started(body, started)
    with pytest.raises(LeaseInterrupt):
        body.run(lambda: sleep(started))
    thread.join()


def test_a_body_that_takes_the_signal_for_itself_is_not_ended(signal_of_others: int) -> None:
    body, started, caught = Body(), threading.Event(), threading.Event()

    def take_it() -> bool:
        signal.signal(signal_of_others, lambda *_: caught.set())
        started.set()
        return caught.wait(LONG)

    thread = interrupted_once_started(body, started)
    assert body.run(take_it)
    assert body.fired
    thread.join()


def test_the_outer_body_is_ended_from_within_an_inner_one() -> None:
    outer, inner, started = Body(), Body(), threading.Event()
    thread = interrupted_once_started(outer, started)
    with pytest.raises(LeaseInterrupt):
        outer.run(lambda: inner.run(lambda: sleep(started)))
    assert (outer.fired, inner.fired) == (True, False)
    thread.join()


def test_ending_the_inner_body_leaves_the_outer_one_running() -> None:
    outer, inner, started = Body(), Body(), threading.Event()
    thread = interrupted_once_started(inner, started)

    def calls_a_task() -> str:
        with pytest.raises(LeaseInterrupt):
            inner.run(lambda: sleep(started))
        return "went on"

    assert outer.run(calls_a_task) == "went on"
    assert not outer.fired
    thread.join()


def test_a_signal_that_comes_just_before_a_system_call_is_sent_again() -> None:
    """The other thread runs when this one lets go of the interpreter, which is right there."""
    for _ in range(100):
        body, started = Body(), threading.Event()
        thread = interrupted_once_started(body, started)
        before = time.monotonic()
        with pytest.raises(LeaseInterrupt):
            body.run(lambda started=started: select_nothing(started))
        assert time.monotonic() - before < LONG / 2
        thread.join()


def test_ending_a_body_on_another_thread_leaves_the_interpreter_as_it_was() -> None:
    """A request for attention left standing slows all threads, and hangs a debugger on 3.11."""
    program = """
        import sys, threading, time
        from celery_singleton_lock.task.interrupt import Body, LeaseInterrupt

        def work():
            body = Body()
            threading.Timer(0.05, body.interrupt).start()
            try:
                body.run(lambda: [time.sleep(0.001) for _ in range(10_000)])
            except LeaseInterrupt:
                print("ended")

        def traced():
            for _ in range(1000):
                str()

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        traced()
        sys.settrace(lambda frame, event, arg: None)
        traced()
        print("traced")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=20
    )
    assert done.stdout == "ended\ntraced\n", done.stderr


def test_cleaning_up_after_an_interruption_is_left_alone() -> None:
    body, started = Body(), threading.Event()
    thread = interrupted_once_started(body, started)
    cleaned: list[bool] = []

    def work() -> None:
        try:
            sleep(started)
        finally:
            body.interrupt()
            signal.raise_signal(interrupt_module._SIGNAL)
            time.sleep(0.1)
            cleaned.append(True)

    with pytest.raises(LeaseInterrupt):
        body.run(work)
    assert cleaned
    thread.join()


def test_wherever_the_signal_strikes_it_ends_the_body_or_nothing() -> None:
    """At each line of ``run``, from before the body to its return."""
    Body().run(lambda: None)  # installs the handler: the signal's default is to kill
    endings: list[bool] = []
    for line in range(100):
        body, left = Body(), iter(range(line))

        def trace(
            frame: FrameType, event: str, arg: Any, body: Body = body, left: Any = left
        ) -> Any:
            if frame.f_code is not Body.run.__code__:
                return None
            if event == "line" and next(left, None) is None and not body.fired:
                body.fired = True
                signal.raise_signal(interrupt_module._SIGNAL)
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            ended = body.run(lambda: 7) != 7
        except LeaseInterrupt:
            ended = True
        finally:
            sys.settrace(previous)
        assert interrupt_module._on_main_thread == [], f"left behind at line event {line}"
        signal.raise_signal(interrupt_module._SIGNAL)
        if not body.fired:
            break  # the last line is behind us
        endings.append(ended)
    assert not body.fired
    assert True in endings
    assert endings[-1] is False, "it was struck when it had returned"


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def race(runs: int) -> tuple[int, int]:
    """Interrupt bodies about when they end; how many were ended, how many were not.

    So often, and on a busy machine, where most timers are late, until there are some of both.

    Raises:
        LeaseInterrupt: One was struck after its body.
    """
    ended = left = 0
    while ended + left < runs or (min(ended, left) <= 20 and ended + left < 20 * runs):
        body = Body()
        length = random.uniform(0, 2e-3)
        killer = threading.Timer(random.uniform(0, 5e-4), body.interrupt)
        killer.start()
        try:
            body.run(lambda length=length: spin(length))
            left += 1
        except LeaseInterrupt:
            ended += 1
        killer.join()
        spin(2e-5)  # what is still on its way strikes here, outside of any except
    return ended, left


@pytest.fixture
def fine_switching() -> Iterator[None]:
    """Threads are switched often enough to meet at the end of a body."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# Event loops. Asyncio takes most exceptions for the end of the one task that raised them.

#: The asyncio tasks of a body, beside its main one.
TASKS = 3


class Loop:
    """A body that runs several asyncio tasks, and what has become of them."""

    def __init__(self, step: Callable[[], None], group: str) -> None:
        self.started = threading.Event()
        self.cleaned = 0
        self._step, self._group = step, group

    async def _work(self) -> None:
        try:
            end = time.monotonic() + LONG
            while time.monotonic() < end:
                self._step()
                self.started.set()
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0.01)
            self.cleaned += 1

    async def main(self) -> None:
        if self._group == "TaskGroup":
            async with asyncio.TaskGroup() as group:
                for _ in range(TASKS):
                    group.create_task(self._work())
        elif self._group == "gather":
            await asyncio.gather(*[self._work() for _ in range(TASKS)], return_exceptions=True)
        else:
            await asyncio.wait([asyncio.create_task(self._work()) for _ in range(TASKS)])


def on_thread(thread: str, function: Callable[[], Any]) -> Any:
    """What the function returns, or its exception, on that thread."""
    if thread == "main":
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def interrupted_on(thread: str, function: Callable[[], Any], started: threading.Event) -> Any:
    """The exception, or the result, of a body on that thread which is interrupted once started."""

    def run() -> Any:
        body = Body()
        interrupting = interrupted_once_started(body, started)
        try:
            return body.run(function)
        except BaseException as exc:
            return exc
        finally:
            interrupting.join()

    return on_thread(thread, run)


ON_ANY_THREAD = pytest.mark.parametrize("thread", ["main", "other"])


@pytest.mark.parametrize("function", [loop, swallow_exceptions])
def test_a_body_on_another_thread_is_ended_between_two_instructions(
    function: Callable[..., None],
) -> None:
    started, before = threading.Event(), time.monotonic()
    outcome = interrupted_on("other", lambda: function(started), started)
    assert type(outcome) is LeaseInterrupt
    assert time.monotonic() - before < LONG / 2


@ON_ANY_THREAD
@pytest.mark.usefixtures("fine_switching")
def test_nothing_strikes_after_the_body(thread: str) -> None:
    ended, left = on_thread(thread, lambda: race(1000))
    assert ended > 20
    assert left > 20


@ON_ANY_THREAD
@pytest.mark.parametrize("group", ["wait", "gather", "TaskGroup"])
@pytest.mark.parametrize("step", [lambda: None, lambda: spin(0.01)], ids=["waits", "computes"])
def test_an_event_loop_is_ended_with_all_its_tasks(
    thread: str, group: str, step: Callable[[], None]
) -> None:
    loop = Loop(step, group)
    before = time.monotonic()
    outcome = interrupted_on(thread, lambda: asyncio.run(loop.main()), loop.started)
    assert isinstance(outcome, LeaseInterrupt)
    assert time.monotonic() - before < LONG / 2
    # A group cancels its tasks again while they clean up.
    assert group == "TaskGroup" or loop.cleaned == TASKS


def test_the_collector_does_not_run_while_a_frame_is_looked_up() -> None:
    """Before Python 3.11.9 that hangs the process, within a second here."""
    code = """
        import gc, os, threading, time
        from celery_singleton_lock.task.interrupt import _frame_of

        class Litter:
            def __init__(self): self.itself = self
            def __del__(self): time.sleep(0.0005)  # lets another thread run, as logging does

        def start_threads():
            while True:
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()

        for _ in range(30):
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        threading.Thread(target=start_threads, daemon=True).start()
        gc.set_threshold(5)
        for _ in range(2000):
            Litter(), Litter(), Litter()
            assert _frame_of(threading.get_ident()) is not None
        assert gc.isenabled()
        gc.disable()
        _frame_of(0)
        assert not gc.isenabled()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


@ON_ANY_THREAD
def test_a_coroutine_that_does_not_yield_ends_its_event_loop(thread: str) -> None:
    started, cancelled = threading.Event(), []
    tasks: list[asyncio.Task[None]] = []

    async def other() -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.append(1)

    async def never_yields() -> None:
        loop(started)

    async def main() -> None:
        tasks.extend(asyncio.create_task(task) for task in (other(), never_yields()))
        await asyncio.wait(tasks)

    before = time.monotonic()
    outcome = interrupted_on(thread, lambda: asyncio.run(main()), started)
    assert isinstance(outcome, LeaseInterrupt)
    assert time.monotonic() - before < LONG / 2
    assert cancelled
    # Else asyncio logs it when the task is collected. In an `ast.parse` of another test that is a
    # SystemError, because Python 3.11 parses the lines of the traceback too.
    assert isinstance(tasks[1].exception(), LeaseInterrupt)


@ON_ANY_THREAD
def test_the_tasks_of_an_event_loop_that_runs_again_do_not_go_on(thread: str) -> None:
    """As in an app that has one event loop for all its bodies."""
    event_loop, first = asyncio.new_event_loop(), Loop(lambda: None, "wait")
    try:
        outcome = interrupted_on(
            thread, lambda: event_loop.run_until_complete(first.main()), first.started
        )
        assert isinstance(outcome, LeaseInterrupt)
        before = time.monotonic()
        left = asyncio.all_tasks(event_loop)
        event_loop.run_until_complete(asyncio.wait(left))
        assert time.monotonic() - before < LONG / 2
        assert first.cleaned == TASKS
        assert all(task.cancelled() for task in left)
    finally:
        event_loop.close()


@ON_ANY_THREAD
def test_an_inner_body_is_ended_in_the_event_loop_of_an_outer_one_which_goes_on(
    thread: str,
) -> None:
    inner_started, started = threading.Event(), threading.Event()
    started.set()

    async def main() -> str:
        inner = Body()
        interrupting = interrupted_once_started(inner, inner_started)
        with pytest.raises(LeaseInterrupt):
            inner.run(lambda: loop(inner_started))
        interrupting.join()
        await asyncio.sleep(0.01)
        return "went on"

    assert on_thread(thread, lambda: Body().run(lambda: asyncio.run(main()))) == "went on"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # those of asyncio.run()
def test_wherever_the_signal_strikes_an_event_loop_it_ends_the_body() -> None:
    """At each line of asyncio's own code, where an exception may lose the wake-up of a task."""

    async def main() -> None:
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))

    def run_a_loop() -> None:
        asyncio.run(main())
        signal.raise_signal(interrupt_module._SIGNAL)  # it is sent until the body has ended

    Body().run(lambda: None)  # installs the handler: the signal's default is to kill
    endings: list[bool] = []
    for line in range(10_000):
        body, left = Body(), iter(range(line))

        def trace(
            frame: FrameType, event: str, arg: Any, body: Body = body, left: Any = left
        ) -> Any:
            if frame.f_globals.get("__name__") not in ("asyncio.base_events", "asyncio.events"):
                return None
            runs = event == "line" and asyncio._get_running_loop() is not None
            if runs and next(left, None) is None and not body.fired:
                body.fired = True
                signal.raise_signal(interrupt_module._SIGNAL)
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            body.run(run_a_loop)
            ended = False
        except LeaseInterrupt:
            ended = True
        finally:
            sys.settrace(previous)
        if not body.fired:
            break  # the last line is behind us
        endings.append(ended)
    assert not body.fired
    assert len(endings) > 100
    assert all(endings)


# Greenlets.

LIBRARIES = {
    "gevent": """\
from gevent import monkey; monkey.patch_all()
from gevent import sleep, spawn
join = lambda greenlet: greenlet.get()
""",
    "eventlet": """\
import eventlet; eventlet.monkey_patch()
from eventlet import sleep, spawn
join = lambda greenlet: greenlet.wait()
""",
}
GREEN = """\
import socket, threading, time
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.task.interrupt import Body, LeaseInterrupt

def interrupt_natively(*bodies, at=lambda: True):
    "As the heartbeat's thread does, once the condition holds."
    def interrupt():
        while not at():
            SystemClock().sleep(0.001)
        for body in bodies:
            body.interrupt()
    native_threads.start_new_thread(interrupt, "heartbeat")

def ended(body, function):
    try:
        return body.run(function)
    except LeaseInterrupt:
        return "ended"

"""


def need(library: str) -> None:
    # Not importorskip(): other tests count the instructions of a process that has imported neither.
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


#: Runs the programs that are written to it, a line each, and writes what each has printed.
SERVE = """
import contextlib, io, json, sys, traceback
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            exec(json.loads(line), dict(globals()))
        except BaseException:
            traceback.print_exc()
    print(json.dumps(out.getvalue()), flush=True)
"""


#: One library keeps the promises quickly, the other one among the slow tests.
IN_EITHER = ["gevent", pytest.param("eventlet", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=IN_EITHER)
def green(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """``green(code)``: what a program prints whose threads are greenlets."""
    need(request.param)
    # The library patches before anything else is imported.
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LIBRARIES[request.param] + GREEN + SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        programs, outputs = process.stdin, process.stdout

        def run(code: str) -> str:
            print(json.dumps(code), file=programs, flush=True)
            return str(json.loads(outputs.readline()))

        try:
            yield run
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "imports", ["gevent.monkey", pytest.param("eventlet", marks=pytest.mark.slow)]
)
def test_a_library_that_is_imported_and_has_not_patched_leaves_bodies_on_threads(
    imports: str,
) -> None:
    need(imports.partition(".")[0])
    program = f"import {imports}\n{GREEN}\nprint(native_threads.is_patched(), Body.__name__)"
    assert printed(program) == "False Body\n"


@pytest.mark.parametrize("library", IN_EITHER)
def test_greenlets_of_one_library_are_known_beside_the_other(library: str) -> None:
    need("gevent")
    need("eventlet")
    code = """\
import gevent.monkey, eventlet
print(native_threads.is_patched(), Body()._throw is not None)
"""
    assert printed(LIBRARIES[library] + GREEN + code) == "True True\n"


def test_a_body_in_a_greenlet_is_ended_where_it_waits(green: Callable[[str], str]) -> None:
    code = f"""
left, right = socket.socketpair()
left.settimeout({LONG})
def yield_in_a_loop():
    end = time.monotonic() + {LONG}
    while time.monotonic() < end:
        sum(range(500))  # a loop of sleep(0) alone can starve all native threads: how-to/pools.md
        sleep(0)
waits = {{
    "in the library": lambda: sleep({LONG}),
    "in time": lambda: time.sleep({LONG}),
    "for an event": lambda: threading.Event().wait({LONG}),
    "for a socket": lambda: left.recv(1),
    "between calculations": yield_in_a_loop,
}}
def work(wait):
    body, started = Body(), []
    interrupt_natively(body, at=lambda: started)
    return ended(body, lambda: started.append(1) or wait())
for name, wait in waits.items():
    print(name, join(spawn(work, wait)))
"""
    assert green(code).splitlines() == [
        "in the library ended",
        "in time ended",
        "for an event ended",
        "for a socket ended",
        "between calculations ended",
    ]


def test_an_event_loop_in_a_greenlet_is_ended_with_all_its_tasks(
    green: Callable[[str], str],
) -> None:
    code = f"""
import asyncio, logging
logging.getLogger("asyncio").disabled = True  # it reports the end of the task that is interrupted
def work():
    body, started, cleaned = Body(), [], []
    async def wait():
        try:
            end = time.monotonic() + {LONG}
            while time.monotonic() < end:
                started.append(1)
                time.sleep(0.01)  # the greenlet waits here, and asyncio does not know
                await asyncio.sleep(0)
        finally:
            cleaned.append(1)
    async def main():
        await asyncio.wait([asyncio.create_task(wait()) for _ in range({TASKS})])
    interrupt_natively(body, at=lambda: len(started) > {TASKS})
    before = time.monotonic()
    result = ended(body, lambda: asyncio.run(main()))
    return result, len(cleaned), time.monotonic() - before < {LONG} / 2
print(*join(spawn(work)))
"""
    assert green(code) == f"ended {TASKS} True\n"


def test_of_many_greenlets_those_that_lost_their_lease_are_ended(
    green: Callable[[str], str],
) -> None:
    code = """
bodies, over = {}, []
def work(number):
    def body():
        while not over:
            sleep(0.001)
        return number
    bodies[number] = Body()
    return ended(bodies[number], body)
greenlets = [spawn(work, number) for number in range(20)]
while len(bodies) < 20:
    sleep(0.001)
interrupt_natively(*[bodies[number] for number in range(0, 20, 2)])
ends = [join(greenlet) for greenlet in greenlets[::2]]
over.append(1)
print({*ends}, [join(greenlet) for greenlet in greenlets[1::2]])
"""
    assert green(code) == f"{{'ended'}} {[*range(1, 20, 2)]}\n"


def test_nothing_strikes_a_greenlet_after_its_body(green: Callable[[str], str]) -> None:
    code = """
def late():
    body = Body()
    # Its hub gets the interruption after the body has ended, because the body never yields.
    def until_interrupted():
        interrupt_natively(body)
        while not body.fired:
            pass
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        return "returned"
    result = ended(body, until_interrupted)
    for _ in range(20):
        sleep(0.001)
    body.interrupt()
    sleep(0.001)
    return result
print(join(spawn(late)))
"""
    assert green(code) == "returned\n"


def test_cleaning_up_in_a_greenlet_is_left_alone(green: Callable[[str], str]) -> None:
    code = f"""
def work():
    body, started = Body(), []
    def until_interrupted():
        try:
            started.append(1)
            sleep({LONG})
        finally:
            body.interrupt()
            sleep(0.05)
            print("cleaned up")
    interrupt_natively(body, at=lambda: started)
    return ended(body, until_interrupted)
print(join(spawn(work)))
"""
    assert green(code) == "cleaned up\nended\n"


# An exception that is raised in a destructor or in a callback of a weak reference is lost.


class _Destroyed:
    def __init__(self, started: threading.Event, body: Body) -> None:
        self._started, self._body = started, body

    def __del__(self) -> None:
        self._started.set()
        end = time.monotonic() + LONG
        while not self._body.fired and time.monotonic() < end:
            time.sleep(0.001)
        for _ in range(100):  # the exception is raised here
            time.sleep(0.001)


def _run_a_destructor_then_sleep(started: threading.Event, body: Body) -> None:
    _Destroyed(started, body)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        time.sleep(0.01)


def _end_after_a_destructor() -> None:
    body, started = Body(), threading.Event()
    thread = interrupted_once_started(body, started)
    try:
        with pytest.raises(LeaseInterrupt):
            body.run(lambda: _run_a_destructor_then_sleep(started, body))
    finally:
        thread.join()


@ON_ANY_THREAD
def test_a_body_whose_destructor_swallows_the_interrupt_is_interrupted_again(thread: str) -> None:
    on_thread(thread, _end_after_a_destructor)


def test_other_exceptions_that_are_lost_are_reported_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    interrupt_module._catch_unraisable.cache_clear()
    Body().interrupt()  # installs the hook

    class Careless:
        def __del__(self) -> None:
            raise KeyError("lost")

    Careless()
    assert reported == [KeyError]
    interrupt_module._catch_unraisable.cache_clear()


def test_a_body_that_ends_while_it_is_interrupted_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about_to_interrupt, ended = threading.Event(), threading.Event()

    def pause() -> None:
        about_to_interrupt.set()
        ended.wait(LONG)

    monkeypatch.setattr(interrupt_module, "_catch_unraisable", pause)
    body = Body()
    thread = threading.Thread(target=body.interrupt)

    def until_then() -> None:
        thread.start()
        assert about_to_interrupt.wait(LONG)

    body.run(until_then)
    ended.set()
    thread.join()
    Body().interrupt()
    assert not interrupt_module._interrupted


def test_a_runner_has_its_loop_where_it_is_looked_for() -> None:
    """Above uvloop, which has no frames of its own."""
    runner = asyncio.Runner()
    assert vars(runner)["_loop"] is None
    with runner:
        assert vars(runner)["_loop"] is runner.get_loop()
