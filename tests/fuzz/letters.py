"""Messages as a foreign publisher may write them: right but for a few fields, which are anything.

All that Celery itself needs to survive (``timelimit`` as a pair, an id that is text) is left right:
what stops a plain Celery worker is no news about ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from celery import Celery
from celery.app.task import Context

from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.message.header import Delivery

#: The queue that workers of the tests consume.
QUEUE = "celery"

_FIELDS = tuple(Delivery(token=Token("id", 0, 0, "nonce")).header())
_FORGED = ("token", "key", "fence", "nonce", "holder", "version", "limit", "slots")
_METHODS = sorted(name for name, value in vars(Context).items() if callable(value))


@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes:
        task: Its name.
        name: Its argument, which is its key.
        headers: Added to those that Celery writes; they win.
    """

    task: str
    name: str
    task_id: str
    headers: dict[str, Any] = field(default_factory=dict)

    def post(self, app: Celery, **properties: Any) -> Letter:
        """Put it straight into the broker."""
        headers = {
            "lang": "py",
            "task": self.task,
            "id": self.task_id,
            "root_id": self.task_id,
            "parent_id": None,
            "group": None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "timelimit": [None, None],
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "origin": "elsewhere",
            **self.headers,
        }
        embedded = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
        with app.connection_for_write() as connection:
            connection.Producer().publish(
                [[self.name], {}, embedded],
                exchange="",
                routing_key=QUEUE,
                serializer="json",
                headers=headers,
                correlation_id=self.task_id,
                **properties,
            )
        return self


class Writer:
    """Writes letters, the same ones for the same seed.

    Args:
        seed: The seed of all choices.
        tasks: Names of tasks.
        names: Arguments to choose from; one of its own for every third letter.
        loot: What belongs to others: keys, claims, tokens, ids.
    """

    def __init__(self, seed: int, tasks: list[str], names: list[str], loot: list[str]) -> None:
        self._random = random.Random(seed)
        self._tasks, self._names, self._loot = tasks, names, loot
        self._written = 0

    def write(self) -> Letter:
        self._written += 1
        own = f"own-{self._written}"
        headers: dict[str, Any] = {}
        for _ in range(self._random.randint(1, 3)):
            headers.update(self._one_of(self._header, self._header, self._header, self._beside)())
        return Letter(
            task=self._random.choice(self._tasks),
            name=self._random.choice([*self._names, own]),
            task_id=str(UUID(int=self._random.getrandbits(128))),
            headers=headers,
        )

    def odd(self) -> Any:
        """Any value."""
        nested: Any = 1
        for _ in range(200):
            nested = [nested] if self._random.random() < 0.5 else {"claim": nested}
        return self._random.choice(
            [
                *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, float("nan"), float("inf")),
                *(10**9 - 1, 10**9, 2**63, 10**400, -(10**30), 1e11 - 1),
                *(
                    "",
                    "x",
                    " ",
                    "a b",
                    "a|b",
                    "l x 1 {}",
                    "\n\x00\x1b[2J",
                    "é日",
                    "\ud800",
                    "{name}",
                ),
                *("x" * 50_000, b"\xff\x00", [], {}, [[]], ["x", 1], {"": None}, {"a": {"b": [1]}}),
                *("0.0", "0.1", "skip", "run", "until_done", "2001-01-01T00:00:00", nested),
                *self._loot,
            ]
        )

    def _header(self) -> dict[str, Any]:
        """Ours, with a few fields that we would not write so."""
        header = {"attempt": "0.0"} if self._random.random() < 0.7 else {}
        for _ in range(self._random.randint(1, 4)):
            header.update(self._one_of(self._field, self._options, self._claim, self._forged)())
        whole: Any = header if self._random.random() < 0.95 else self.odd()
        return {"singleton_lock": whole}

    def _field(self) -> dict[str, Any]:
        return {self._random.choice(_FIELDS): self.odd()}

    def _forged(self) -> dict[str, Any]:
        return {self._random.choice(_FORGED): self.odd()}

    def _options(self) -> dict[str, Any]:
        rule = {
            "action": self._random.choice(["skip", "retry", "raise", "revoke", self.odd()]),
            # Not `wait`: for how long, its caller may say (docs/reference/stability.md).
            "delay": self._random.choice([0.05, self.odd()]),
            "max_delay": self._random.choice([0.1, self.odd()]),
            "max_wait": self._random.choice([0.5, self.odd()]),
        }
        options = {
            "on_conflict": self._random.choice([rule, "skip", "retry", "raise", self.odd()]),
            "ttl": self._random.choice([5, self.odd()]),
            "unique": self._random.choice([None, "until_start", "until_done", self.odd()]),
            "unique_for": self._random.choice([5, self.odd()]),
            "on_duplicate": self.odd(),
            "key": self.odd(),
            "limit": self.odd(),
            "min_hold": self.odd(),
        }
        chosen = self._random.sample(sorted(options), self._random.randint(1, 3))
        return {"options": {name: options[name] for name in chosen}}

    def _claim(self) -> dict[str, Any]:
        claim = {
            "key": self._random.choice(self._loot),
            "unique": self._random.choice(["until_start", "until_done"]),
            "unique_for": 30,
            "duplicate": False,
        }
        if self._random.random() < 0.5:
            claim[self._random.choice(sorted(claim))] = self.odd()
        period = {"period": claim["key"]} if self._random.random() < 0.2 else {}
        return period | {"claim": claim if self._random.random() < 0.95 else self.odd()}

    def _beside(self) -> dict[str, Any]:
        """Headers of other names, which Celery or this library makes attributes of the request."""
        name = self._random.choice(
            [
                *("singleton_data", "singleton_begun", "singleton_claim", "is_eager"),
                *("singleton_scheduled_at", "headers"),
                *("called_directly", "properties", "delivery_info", "hostname", "redelivered"),
                *("retries", "replaced_task_nesting", "expires", *_METHODS),
            ]
        )
        value = self.odd()
        if name == "expires":
            value = self._random.choice([None, "2001-01-01T00:00:00+00:00"])
        if name == "retries":
            # Celery computes with it.
            value = self._random.choice([0, 1, 2, 10**9, 2**63, -1])
        return {name: value}

    def _one_of(self, *makers: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return self._random.choice(makers)
