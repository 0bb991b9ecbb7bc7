"""Publishes jobs over a few keys, and keeps only so many of them waiting."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from celery import uuid
from celery.exceptions import OperationalError as CeleryError
from kombu.exceptions import OperationalError

from celery_singleton_lock import StoreError
from tests.chaos.bodies import LIMITS, RATES
from tests.chaos.queues import QUEUED

#: What is published, and how often in relation to each other.
MIX = {
    "late": 4,
    "late_skip": 2,
    "heedless": 1,
    "lasting": 2,
    "waiting": 1,
    "limited": 4,
    "held": 2,
    "held_async": 2,
    "latest": 2,
    "claimed": 2,
    "newest": 4,
    "debounced": 4,
    "again": 1,
    "early": 2,
    "plain": 2,
}

#: What is published instead by a campaign of the queue of a key.
QUEUE_MIX = {"queued": 3, "queued_early": 2, "queued_several": 4, "rated": 2}

#: Tasks whose calls are numbered, because their messages run with the newest arguments.
NUMBERED = frozenset({"newest", "debounced"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long bodies take.

    Attributes:
        weight: How often, in relation to the others.
        steps: How many guarded steps.
        shortest, longest: Seconds of a step.
    """

    weight: int
    steps: int
    shortest: float
    longest: float


#: Most are short; some need renewals (ttl 2 s); a few outlast the visibility timeout, and are
#: delivered twice.
LENGTHS = (
    Length(weight=24, steps=2, shortest=0.01, longest=0.08),
    Length(weight=4, steps=2, shortest=0.1, longest=0.4),
    Length(weight=2, steps=3, shortest=0.3, longest=0.9),
    Length(weight=1, steps=4, shortest=0.9, longest=1.4),
)
#: The keys of calls that wait in queues: few, so that some are waiting at any time.
_QUEUES = 3
#: The share of the calls of `claimed` whose message a worker discards.
_DAMAGED = 0.6
#: How many calls of `claimed` in a row have one key.
_OF_ONE_CLAIM = 4
#: The share of its calls that have a key of earlier ones, whose claims should be free by then.
_CLAIMED_AGAIN = 0.3
#: The share of these calls that have a countdown, and so no place before a worker receives them.
_TIMED = 0.2
#: The length of `lasting`: many of its bodies run when the store restarts.
_LASTING = LENGTHS[-1]


class Publisher:
    """Publishes from one process.

    Args:
        module: The app's, with tasks by name.
        keys: Over which jobs are spread.
        mix: See `MIX`.
        lengths: See `LENGTHS`.
        seed: The seed of its chances.
    """

    def __init__(
        self,
        module: ModuleType,
        *,
        keys: Sequence[str],
        mix: dict[str, int],
        lengths: Sequence[Length],
        seed: int,
    ) -> None:
        self._module = module
        self._keys = list(keys)
        self._mix = mix
        self._lengths = list(lengths)
        self._random = random.Random(f"{seed} publisher")
        self._calls = 0
        self._lasting = 0
        self._claimed = 0

    def publish(self) -> bool:
        """One job; whether the broker took it. What became of the others is not known."""
        chances = self._random
        name = chances.choices(list(self._mix), weights=list(self._mix.values()))[0]
        length = chances.choices(self._lengths, weights=[each.weight for each in self._lengths])[0]
        key = chances.choice(self._keys)
        if name == "lasting":
            # A key of its own: the lease of one that was killed would hold up others for long.
            self._lasting += 1
            length, key = _LASTING, f"lasting{self._lasting}"
        if name in LIMITS:
            key = name  # one key, so that more of its calls than the limit are waiting at any time
        elif name in QUEUED:
            key = f"{'rate' if name in RATES else 'queue'}{chances.randrange(_QUEUES)}"
        seconds = chances.uniform(length.shortest, length.longest)
        task: Any = getattr(self._module, name)
        arguments = [key, length.steps, round(seconds, 3)]
        if name in NUMBERED:
            self._calls += 1
            arguments.append(self._calls)
        if name in QUEUED:
            return self._queue(task, arguments)
        if name == "claimed":
            return self._claim(task, arguments)
        try:
            result = task.apply_async(arguments, retry=False)
        except (OperationalError, CeleryError, OSError):
            return False  # the broker is down
        if name in NUMBERED:
            self._module.called(result.id, self._calls)
        return True

    def _claim(self, task: Any, arguments: list[Any]) -> bool:
        """One call with a claim; a worker discards the messages of some."""
        number = self._claimed // _OF_ONE_CLAIM
        if self._random.random() < _CLAIMED_AGAIN:
            number = self._random.randint(0, number)
        else:
            self._claimed += 1
        arguments[0] = f"claim{number}"
        task_id, options = uuid(), dict[str, Any]()
        if self._random.random() < _DAMAGED:
            options |= self._random.choice(self._module.DAMAGING)
            self._module.damaged(task_id)
        entered = time.monotonic()
        try:
            result = task.apply_async(arguments, task_id=task_id, retry=False, **options)
        except (OperationalError, CeleryError, OSError):
            return False
        if result.id != task_id:
            self._module.answered(result.id, entered)
        return True

    def _queue(self, task: Any, arguments: list[Any]) -> bool:
        """One call that takes a place in the queue of its key; some take it when they arrive."""
        task_id, entered = uuid(), time.monotonic()
        countdown = 0.01 if self._random.random() < _TIMED else None
        try:
            task.apply_async(arguments, task_id=task_id, retry=False, countdown=countdown)
        except (OperationalError, CeleryError, OSError, StoreError) as error:
            self._module.unsent(task_id, known="unknown" not in str(error))
            return False
        self._module.returned(task_id, entered, placed=countdown is None)
        return True
