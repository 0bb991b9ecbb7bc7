"""Forks that hold one key in turn and are killed at random; the kernel's flock shows overlaps.

Run as ``python -m tests.apps.mortal URL SECONDS PATH``: prints one line of JSON at the end. The
lock on the file ends with its process, before the parent can see the process as dead.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from celery import Celery

from celery_singleton_lock import LockConflict, hold

CHILDREN = 4
#: Seconds; longer than any run: what frees a dead child's key is not the ttl.
TTL = 600


def body(path: Path) -> None:
    """Write down whether another process is in its body too."""
    with path.open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.write("alone\n")
        except OSError:
            log.write("overlap\n")
        log.flush()
        time.sleep(random.uniform(0, 0.01))


def live(app: Celery, path: Path) -> None:
    """What a child does until it is killed."""
    while True:
        # Without the wait queue, in which killed children count as waiting for a while.
        with suppress(LockConflict), hold("k", scope="mortal", ttl=TTL, app=app):
            body(path)
        time.sleep(random.uniform(0, 0.01))


def forked(app: Celery, path: Path) -> int:
    child = os.fork()
    if not child:
        random.seed()
        try:
            live(app, path)
        finally:
            os._exit(1)
    return child


def main(url: str, seconds: str, file: str) -> None:
    app, path = Celery("mortal", broker="memory://"), Path(file)
    app.conf.singleton_lock_url = url
    with hold("first", scope="mortal", app=app):
        pass  # the forks find all modules imported
    children = [forked(app, path) for _ in range(CHILDREN)]
    kills, end = 0, time.monotonic() + float(seconds)
    while time.monotonic() < end:
        time.sleep(random.uniform(0.02, 0.1))
        dead = children.pop(random.randrange(CHILDREN))
        os.kill(dead, signal.SIGKILL)
        time.sleep(random.choice((0, 0.03)))  # it may be a zombie for a while
        os.waitpid(dead, 0)
        kills += 1
        children.append(forked(app, path))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lines = path.read_text().splitlines()
    counts = {word: lines.count(word) for word in ("alone", "overlap")}
    print(json.dumps({"kills": kills, **counts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
