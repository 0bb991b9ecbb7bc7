"""Worker events, for monitors such as Flower: ``singleton-<event name>``.

Overview
    An event is one line of JSON in a pipe that the worker's parent creates before its pool forks.
    All processes of the worker write to the pipe. The parent reads it, and sends once a second what
    it has read (``worker.event_sender``). Of the events that each task run has, it sends the
    numbers (``counts``).

Guarantees
    Emitting an event is one write that never blocks: no broker, however slow, delays a body, a
    heartbeat or a release. What a process has written survives its SIGKILL. Lines of several
    processes do not mix, because each fits in ``PIPE_BUF`` bytes.

Non-guarantees
    The pipe has the system's size (64 KiB on Linux). It is read every 20 ms, so it is full only if
    the parent gets no processor time. Further events are then dropped and counted, and the
    process's next event that is written reports their number (`DROPPED_EVENTS`). A SIGKILL of the
    parent loses what it has not sent: the events of a second, or of the broker's outage.
"""

from __future__ import annotations

import json
import mmap
import os
import select
from functools import lru_cache
from typing import Any, ClassVar, Final

from ..core import native_threads
from ..core.clock import SystemClock
from ..core.events import Event, EventName
from ..core.process import this_process
from .counts import COUNTED

#: The type of the worker event that counts events that were dropped.
DROPPED_EVENTS: Final = "singleton-events-dropped"
#: The line that ends the reader.
END: Final = b"\n"
# Characters of a text in an event, such as a client's error. Four of them fit in PIPE_BUF.
_LONGEST_TEXT: Final = 500


class EventPipe:
    """The pipe of one worker.

    Attributes:
        reader: The file descriptor for the parent.
        dropped: The number of events that this process has dropped and not reported yet.
    """

    #: The pipe of this worker; set by the bootstep before the pool forks. None: not in a worker.
    #: It is a class variable, because runtimes may already exist then.
    running: ClassVar[EventPipe | None] = None
    #: Its first byte is 1 while the worker sends task events. Shared with the pool's processes.
    switch: ClassVar[mmap.mmap | bytes] = b"\0"

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Eventlet's own write() may switch to another greenlet.
        self._write = native_threads.original("write", "os")
        self._process = this_process()
        self.dropped = 0

    @classmethod
    def open(cls) -> EventPipe:
        """Open the pipe of a worker, switched off; the next worker of this process uses it too."""
        if cls.running is None or cls.running._process is not this_process():
            cls.switch, cls.running = mmap.mmap(-1, 1), cls()
        cls.turn(on=False)
        return cls.running

    @classmethod
    def turn(cls, on: bool) -> None:
        """Switch the events on or off, in all processes of the worker."""
        if isinstance(cls.switch, mmap.mmap):
            cls.switch[0] = on

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Write one event; drop it if the pipe is full."""
        self.write(_line_of(kind, fields))

    def write(self, line: bytes) -> None:
        """Write the line of one event; drop it if the pipe is full."""
        if self.dropped and self._write_line(_line_of(*dropped_events(self.dropped))):
            self.dropped = 0
        if not self._write_line(line):
            self.dropped += 1

    def end(self) -> None:
        """Make the reader end once it has read what was written before."""
        try:
            self._write(self._writer, END)
        except BlockingIOError:
            pass  # the pipe is full: its reader is stuck, and is not waited for

    def _write_line(self, line: bytes) -> bool:
        if len(line) > select.PIPE_BUF:
            return False
        try:
            self._write(self._writer, line)
        except BlockingIOError:
            return False
        return True


def send_worker_event(event: Event) -> None:
    """Send the worker event of an event, if this worker sends events."""
    pipe = EventPipe.running
    if pipe is None or not EventPipe.switch[0]:
        return
    name, data = event.name, event.data
    measured = COUNTED.get(name)
    if measured is not None:
        # Each task run writes two of these: the encoder would take as long as all the rest.
        pipe.write(f"{_beginning(name, event.task)},{data[measured]!r}]\n".encode())
        return
    fields = {"uuid": event.task_id, "timestamp": _clock.wall()}
    ours = {"name": event.task, "key": event.key, "holder": _holder(event)}
    known = {word: _short(value) for word, value in data.items() if value is not None}
    if event.lease:
        known["lease"] = event.lease
    pipe.put(f"singleton-{name}", {**known, **ours, **fields})
    if name is EventName.CONFLICT and data.get("outcome") == "skip":
        pipe.put("task-skipped", {**ours, **fields})
    elif name is EventName.CANCELLED or data.get("outcome") == "revoke":
        # The fields of the event that Celery's worker sends for its own revocations.
        pipe.put("task-revoked", {"terminated": False, "signum": None, "expired": False, **fields})


def dropped_events(count: int) -> tuple[str, dict[str, Any]]:
    """The type and the fields of the event that reports dropped events."""
    return DROPPED_EVENTS, {"uuid": "", "count": count}


_clock: Final = SystemClock()


def _line_of(*values: Any) -> bytes:
    return json.dumps(values, default=str, separators=(",", ":")).encode() + b"\n"


@lru_cache(maxsize=1024)
def _beginning(event: EventName, task: str) -> str:
    return f"[{json.dumps(event)},{json.dumps(task)}"


def _holder(event: Event) -> str:
    holder = event.holder
    return str(holder) if holder.task_id else ""


def _short(value: Any) -> Any:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value
