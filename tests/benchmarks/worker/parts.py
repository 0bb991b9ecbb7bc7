"""Where a lock's time in a task goes: a stopwatch around each part, in a worker of its own.

Each part is what a function spends itself, without the other parts that it calls. What a
stopwatch costs is measured first, and taken off.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from celery.signals import task_postrun

__all__ = [
    *("CELERYS", "PARTS", "SENDING", "WAITING", "Part", "Stopwatch"),
    *("find", "install", "take"),
]

_OURS: Final = "celery_singleton_lock"
#: Celery's own, within one of ours; and what its own clients do.
CELERYS: Final = "Celery's"
_HOOKS: Final = "hooks of the task class and of the tracer"
_LEASE: Final = "the lease, registered and struck off"
_HEARTBEAT: Final = "the heartbeat's list"
_KEY: Final = "the key"


@dataclass(frozen=True, slots=True)
class Part:
    """A function, and what of a task's time is its.

    Attributes:
        module, path: Where it is.
        name: In the table.
        step: What it begins, if anything.
        of_steps: Whether it is separated by the step that it is in; in none, it is Celery's.
    """

    module: str
    path: str
    name: str
    step: str = ""
    of_steps: bool = False


SENDING: Final = "sending"
WAITING: Final = "waiting for the reply"
PARTS: Final = (
    Part("celery.worker.request", "Request.__init__", CELERYS),
    Part(
        f"{_OURS}.worker.request", "SingletonRequestMixin.__init__", "the delivery: nonce, headers"
    ),
    Part(f"{_OURS}.task.base", "SingletonTask.__call__", _HOOKS),
    Part(f"{_OURS}.task.base", "SingletonTask.after_return", _HOOKS),
    Part(f"{_OURS}.task.run", "TaskRun.__init__", "the task run: message, policy, claim"),
    Part(f"{_OURS}.task.run", "TaskRun._make_key", _KEY),
    Part(f"{_OURS}.core.key", "Keyspace.lock", _KEY),
    Part(f"{_OURS}.task.run", "TaskRun.run", "the call, and running the body"),
    Part(f"{_OURS}.task.run", "TaskRun.finish", "settling: what becomes of the key"),
    Part(f"{_OURS}.core.locker", "Locker.acquire", _LEASE),
    Part(f"{_OURS}.core.locker", "Locker.give_back", _LEASE),
    Part(f"{_OURS}.core.heartbeat", "Heartbeat.add", _HEARTBEAT),
    Part(f"{_OURS}.core.heartbeat", "Heartbeat.let_go", _HEARTBEAT),
    Part(f"{_OURS}.core.heartbeat", "Heartbeat.confirmed", _HEARTBEAT),
    Part(f"{_OURS}.stores.redis.store", "RedisStore.acquire", "acquire: the store", step="acquire"),
    Part(
        f"{_OURS}.stores.redis.store",
        "RedisStore.release_async",
        "release: the store",
        step="release",
    ),
    Part(f"{_OURS}.stores.redis.connection", "pack", "packing", of_steps=True),
    Part("redis.connection", "AbstractConnection.send_packed_command", SENDING, of_steps=True),
    Part("redis.connection", "AbstractConnection.read_response", "parsing", of_steps=True),
    Part("redis._parsers.socket", "SocketBuffer._read_from_socket", WAITING, of_steps=True),
)

_CALIBRATING: Final = 20_000


class Stopwatch:
    """A stopwatch of the thread that makes it, which runs the bodies.

    Args:
        clock: Seconds.

    Attributes:
        spent: Seconds by part.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.get_ident()
        # For each part under way, the innermost last: the seconds of the parts within.
        self._within = [0.0]
        self._step = ""
        # Seconds that a stopwatch adds to its own part, and to the one around it.
        self._inside = self._outside = 0.0
        self._calibrate()

    def around(
        self, function: Callable[..., Any], name: str, *, step: str = "", of_steps: bool = False
    ) -> Callable[..., Any]:
        """``function``, timed; for the rest, see `Part`."""
        clock, within, spent, thread = self._clock, self._within, self.spent, self._thread

        def timed(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **options)
            within.append(0.0)
            outer, self._step = self._step, step or self._step
            begin = clock()
            try:
                return function(*args, **options)
            finally:
                took = clock() - begin
                part = name
                if of_steps:
                    part = f"{outer}: {name}" if outer else CELERYS
                self._step = outer
                spent[part] += took - within.pop() - self._inside
                within[-1] += took + self._outside

        return timed

    def _calibrate(self) -> None:
        timed = self.around(_nothing, "nothing")
        inside, both = [], []
        for _ in range(_CALIBRATING):
            self.spent.clear()
            begin = self._clock()
            timed(self)
            both.append(self._clock() - begin)
            inside.append(self.spent["nothing"])
        self.spent.clear()
        middle = _CALIBRATING // 2
        self._inside = sorted(inside)[middle]
        self._outside = sorted(both)[middle] - self._inside


_watches: list[Stopwatch] = []


def find(module: str, path: str) -> tuple[Any, str, Callable[..., Any]]:
    """What holds a function, its name there, and the function itself.

    Raises:
        AttributeError: It isn't there; its part has moved.
    """
    holder = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        holder = getattr(holder, one)
    return holder, name, getattr(holder, name)


def install() -> None:
    """Time all parts in this process from now on."""
    watch = Stopwatch()
    _watches.append(watch)
    for part in PARTS:
        holder, name, function = find(part.module, part.path)
        timed = watch.around(function, part.name, step=part.step, of_steps=part.of_steps)
        setattr(holder, name, timed)
    _, _, receiver = find(f"{_OURS}.task.base", "_finish_rest")
    task_postrun.disconnect(receiver)
    task_postrun.connect(watch.around(receiver, _HOOKS), weak=False)


def take() -> dict[str, float]:
    """Seconds by part since the last time."""
    found = dict(_watches[0].spent)
    _watches[0].spent.clear()
    return found


def _nothing(one: Any) -> None:
    """As cheap as a function gets."""
