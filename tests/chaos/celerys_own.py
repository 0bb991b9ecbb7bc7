"""Ends of workers that Celery 5.7 and kombu 5.7 bring about by themselves; excused by name alone.

Each was looked into when a campaign met it. Anything else that ends by itself, or comes to no end,
is a violation.
"""

from __future__ import annotations

import re
from pathlib import Path

import celery_singleton_lock
from tests.chaos.stacks import HEAD

_PACKAGE = str(Path(celery_singleton_lock.__file__).parent)
#: The functions of redis-py that wait for a server.
_WAITS_FOR_NETWORK = re.compile(r"/redis/\S+, line \d+, in (_connect|_?read_from_socket)$")

#: The only reason for a hang that also needs a fault: one of `OFF_BROKER`.
BROKER_AWAY = "shutdowns that waited for a broker out of reach"
#: The faults that put the broker out of a worker's reach.
OFF_BROKER = frozenset({"restart-broker", "host-unplugged", "host-off-broker", "host-flapping"})

_CRASHES = {
    # Kombu acknowledges a message on a channel that the loss of the broker has closed.
    "AttributeError: 'NoneType' object has no attribute 'hostname'": (
        "workers that kombu ended when it lost the broker"
    ),
    # Kombu opens a channel on a connection that the loss of the broker has closed.
    "AttributeError: 'NoneType' object has no attribute 'client'": (
        "workers that kombu ended when it lost the broker"
    ),
    # A pool process was killed before the parent read that it was up, and then the broker was lost
    # (celery#6052): 4 of 5 plain workers in a row that met both in their start.
    "in get_process_queues\n    return next(": (
        "workers that Celery ended because a child was killed at its start"
    ),
    # A pool process was killed before it could say that it was up.
    "WorkerLostError: Could not start worker processes": (
        "workers that Celery ended because a child was killed at its start"
    ),
}


def reason_for_crash(log: str) -> str:
    """Which of Celery's own errors has ended a worker with this log; empty if none."""
    if "Unrecoverable error: " not in log and "Traceback" not in log:
        return ""
    return next((reason for error, reason in _CRASHES.items() if error in log), "")


def reason_for_hang(stacks: str) -> str:
    """Which of Celery's own waits keeps a worker with these stacks from ending; empty if none.

    A cold or soft shutdown runs in the handler of its signal, whatever that has interrupted. What
    counts is what the main threads do; the parent heartbeat is in frames of ours at all times.
    """
    parent, *dumps = stacks.split(HEAD)
    main = parent.partition("MainThread\n")[2].partition("LOCAL VARIABLES")[0]
    interrupted, marker, handler = main.partition(", in _handle_request\n")
    # The interrupted code of Celery waits for its signal handler, whichever code called it.
    frames = [line for line in interrupted.splitlines() if line.startswith("  File ")][-2:]
    if any(_PACKAGE in text for text in ([*frames, handler] if marker else [main])):
        return ""
    # The signal has interrupted the writing of a job to a child, or its pipe has half a message:
    # the pool waits for answers that do not come.
    if "_flush_outqueue" in main:
        return "shutdowns that hung in Celery's own pool"
    # The handler waits for the children to end, and reads no more results. The signal struck while
    # the parent read one, or before it could: in a restart of the consumer, which discards jobs. A
    # child waits until its last result is counted: for 30 s; or for ever, if the interrupted code
    # has the counter's lock. Plain Celery does so, with no task that has a lock.
    waits_for_child = all(
        f", in {name}\n" in handler for name in ("on_cold_shutdown", "join", "wait")
    )
    children = dumps[1:]  # the first is the parent's
    if waits_for_child and children and all(_waits_to_be_counted(child) for child in children):
        return "shutdowns that waited for a child whose last result Celery had not counted"
    # In a warm shutdown the parent waits for the children to end, and reads no more results. A
    # child waits until its last result is counted, or until there is room for it in the pipe. Plain
    # Celery 5.7 hung in 8 of 12 shutdowns during a stream of results of 30 kB and more.
    is_warm = all(f", in {name}\n" in main for name in ("_shutdown", "on_stop", "join", "wait"))
    if is_warm and children and all(map(_waits_for_the_reader, children)):
        return "warm shutdowns that waited for a child whose results Celery no longer read"
    # In its last step a shutdown acknowledges and restores messages. Kombu connects to the broker
    # for it and reads the replies, both without a limit of its own, one message after the other.
    # Plain Celery 5.7 took 45 and 80 s more when a broker was out of reach after SIGTERM, of which
    # the kernel gave up each connection after 11 s; and did not end in 170 s when one was silent.
    if ", in _shutdown\n" in main and _waits_for_the_broker(main):
        return BROKER_AWAY
    return ""


def _waits_for_the_broker(main: str) -> bool:
    """Whether a main thread waits for the network in a request of kombu's."""
    frames = [line for line in main.splitlines() if line.startswith("  File ")]
    # The last two are of Celery's signal handler that has printed this.
    while frames and frames[-1].endswith((", in cry", ", in cry_handler")):
        frames.pop()
    waits = bool(frames) and _WAITS_FOR_NETWORK.search(frames[-1])
    # What redis-py does comes last, and kombu has asked it.
    kombus = [line for line in frames if "/redis/" not in line][-1:]
    return bool(waits and kombus and "/kombu/transport/redis.py" in kombus[0])


def _waits_for_the_reader(dump: str) -> bool:
    """Whether a pool process waits for the parent to read its results, or to count them."""
    sends = [each for each in dump.split("\n\n") if " in send_payload\n" in each]
    return _waits_to_be_counted(dump) or (bool(sends) and _PACKAGE not in sends[0])


def _waits_to_be_counted(dump: str) -> bool:
    """Whether a pool process waits for the parent to count its results."""
    threads = [each for each in dump.split("\n\n") if " in _ensure_messages_consumed\n" in each]
    return bool(threads) and _PACKAGE not in threads[0]
