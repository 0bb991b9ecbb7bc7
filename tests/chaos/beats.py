"""Several beats of one schedule in a campaign, and what is wrong with their ticks.

Each beat reaches broker and lock store through proxies of its own. Their ticks stay in a queue that
no worker consumes, in a database of the broker of their own.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import redis

from tests.chaos.history import span
from tests.chaos.proxy import Kind as How
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.schedule import SORTS, Fault, Lane
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events
from tests.harness.ticks import Tick, Ticks
from tests.harness.worker import CeleryBeat

#: Seconds: of the entry, of the leader's lease, between two tries of a standby.
EVERY, TTL, POLL = 0.5, 3.0, 0.2
#: The broker's.
DATABASE = 2
#: Seconds in which a standby takes over, and in which all recover from what struck all.
_TAKEOVER = 3.0
#: Seconds in which a tick may still be sent that was authorized before the store lost its data.
_UNDER_WAY = 1.0
#: Seconds: moments are stored in microseconds.
_SAME_POINT = 5e-6
#: The faults that concern all beats.
_OF_ALL = {sort.name for sort in SORTS if sort.lane in (Lane.STORE, Lane.BROKER)}


@dataclass(slots=True)
class _Post:
    broker: Proxy
    store: Proxy | None  # none if the store has several members
    beat: CeleryBeat


class Beats:
    """The beats of a campaign.

    Args:
        stack: What ends with the campaign.
        broker, store: The ports of the servers; no store: it has several members.
        lock_url: Names the store; of one server, its port is replaced by a proxy's.
        count: How many.
        directory: For the logs.
        broken: The breakage, see tests.chaos.broken; empty for none.
    """

    def __init__(
        self,
        stack: ExitStack,
        *,
        broker: int,
        store: int | None,
        lock_url: str,
        count: int,
        directory: Path,
        broken: str,
    ) -> None:
        self._broker, self._directory, self._generation = broker, directory, 0
        self._broken, self._store, self._lock_url = broken, store, lock_url
        self._written: Counter[Tick] = Counter()
        # One for all ticks: measured again, it would move the grid by microseconds.
        self._offset = time.time() - time.monotonic()
        self.posts: list[_Post] = []
        for _ in range(count):
            to_broker = stack.enter_context(Proxy(broker))
            to_store = stack.enter_context(Proxy(store)) if store else None
            self.posts.append(_Post(to_broker, to_store, self._beat(to_broker, to_store)))
        stack.callback(self.end)

    def restart(self, post: _Post) -> CeleryBeat:
        """Kill the beat at ``post``; the one that takes its place, not yet started."""
        self._kill(post.beat)
        post.beat = self._beat(post.broker, post.store)
        return post.beat

    def lead_to(self, store: int) -> None:
        """From now on another server is the store."""
        for post in self.posts:
            if post.store is not None:
                post.store.lead_to(store)

    def end(self) -> None:
        """Kill all."""
        for post in self.posts:
            self._kill(post.beat)

    def new_ticks(self) -> Iterator[dict[str, float]]:
        """The new ticks in the queue, as fields of a record; times of CLOCK_MONOTONIC."""
        with redis.Redis(port=self._broker, db=DATABASE, decode_responses=True) as client:
            ticks = Counter(Ticks(client).of())
        new, self._written = ticks - self._written, ticks
        for tick in new.elements():
            if tick.due is not None:
                at, due = tick.sent_at - self._offset, tick.due - self._offset
                yield {"at": at, "due": due, "beat": tick.beat}

    def _beat(self, broker: Proxy, store: Proxy | None) -> CeleryBeat:
        url = self._lock_url
        if store is not None:
            url = url.replace(f":{self._store}/", f":{store.port}/")
        self._generation += 1
        settings = {"singleton_lock_beat_ttl": TTL, "singleton_lock_beat_poll": POLL}
        environment = {
            "BROKER_URL": f"redis://127.0.0.1:{broker.port}/{DATABASE}",
            "RESULT_URL": "cache+memory://",
            "LOCK_URL": url,
            "EVERY": str(EVERY),
            "SETTINGS": json.dumps(settings),
            "CHAOS_BROKEN": self._broken,
        }
        name = f"beat-{self._generation}"
        return CeleryBeat("tests.chaos.ticks", scheduler="singleton", name=name, env=environment)

    def _kill(self, beat: CeleryBeat) -> None:
        with suppress(Exception):
            beat.kill_group()
        (self._directory / f"{beat.name}.log").write_text(beat.log)


def strike(beats: Beats, fault: Fault) -> tuple[str, CeleryBeat | None]:
    """Do it to one beat and undo it; whom it struck, and the beat to start in its place."""
    post = beats.posts[int(fault.chance * len(beats.posts)) % len(beats.posts)]
    name, beat = post.beat.name, post.beat
    if fault.name == "kill-beat":
        return name, beats.restart(post)
    if fault.name == "stop-beat":
        beat.stop()
        time.sleep(fault.seconds)
        beat.cont()
        return name, None
    hows = (How.STALL, How.NO_REPLIES, How.REFUSE)
    post.broker.set(Mode(kind=hows[int(fault.chance * 997) % len(hows)]))
    time.sleep(fault.seconds)
    post.broker.set(Mode())
    return name, None


def wrong_ticks(records: Sequence[Record]) -> list[Violation]:
    """Ticks that came twice, are off their grid, or did not come though a beat could send them.

    A store that loses its data knows no last runs: what came before and after it is not compared.
    """
    ticks = sorted(events(records, "tick"), key=lambda record: record.at)
    losses = sorted(span(loss) for loss in events(records, "loss"))
    found = []
    for segment in _segments(ticks, losses):
        dues = [round(tick.data["due"], 5) for tick in segment]
        found += [
            Violation(kind=Kind.TICK_TWICE, at=due, text=f"the run due at {due} came {count} times")
            for due, count in Counter(dues).items()
            if count > 1
        ]
        for tick in segment:
            place = (tick.data["due"] - segment[0].data["due"]) / EVERY
            if abs(place - round(place)) * EVERY > 10 * _SAME_POINT:
                text = f"{place:.6f} intervals after the first since the store lost its data"
                found.append(Violation(kind=Kind.OFF_GRID, at=tick.at, text=text))
    faults = [record for record in events(records, "fault") if record.data["name"] in _OF_ALL]
    troubles = [(fault.at, fault.data["end"] + TTL + _TAKEOVER) for fault in faults]
    for tick, following in pairwise(ticks):
        silence = _outside(tick.at, following.at, troubles)
        if silence > TTL + _TAKEOVER + EVERY:
            text = f"none for {silence:.1f} s in which the store and a beat's broker answered"
            found.append(Violation(kind=Kind.NO_TICK, at=following.at, text=text))
    return found


def _segments(
    ticks: Sequence[Record], losses: Iterable[tuple[float, float]]
) -> Iterator[list[Record]]:
    """The ticks between two losses; none of those that were sent while the store lost data."""
    begin = float("-inf")
    for since, at in [*losses, (float("inf"), float("inf"))]:
        segment = [tick for tick in ticks if begin <= tick.at < since]
        if segment:
            yield segment
        begin = at + _UNDER_WAY


def _outside(begin: float, end: float, troubles: Iterable[tuple[float, float]]) -> float:
    """Seconds between ``begin`` and ``end`` that are in none of ``troubles``."""
    seconds = 0.0
    for since, until in sorted(troubles):
        if until > begin:
            seconds += max(0.0, min(since, end) - begin)
            begin = max(begin, min(until, end))
    return seconds + max(0.0, end - begin)
