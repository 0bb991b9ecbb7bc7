"""The parts of a call with a claim, for a `Stopwatch`: what ours does before Celery publishes."""

from __future__ import annotations

from typing import Final

from tests.benchmarks.worker.parts import Part, Stopwatch, find

__all__ = ["PARTS", "SENDING", "WAITING", "install", "is_celerys"]

_OURS: Final = "celery_singleton_lock"
# What is separated by the step that it is in has the step before its name.
_CELERY, _CALL, _STORE = "Celery's", "the call", "the store"
SENDING: Final = f"{_STORE}: sending"
WAITING: Final = f"{_STORE}: waiting for the reply"
_KEY: Final = "the key, of the lock and of the claim"

PARTS: Final = (
    Part("celery.app.task", "Task.apply_async", _CELERY, step=_CELERY),
    Part(f"{_OURS}.task.base", "SingletonTask.apply_async", "the call: header, policy", step=_CALL),
    # It makes one anyway, where none is given.
    Part(f"{_OURS}.publish.apply_async", "uuid", f"{_CELERY} task id"),
    Part(f"{_OURS}.publish.apply_async", "_key_of", _KEY),
    Part(f"{_OURS}.message.claim", "Claim.of", _KEY),
    Part(
        "celery.utils.collections",
        "ConfigurationView.__getitem__",
        "is it eager, by Celery's configuration",
        of_steps=True,
    ),
    Part(
        f"{_OURS}.publish.publication",
        "Publication.publish",
        "the claim: owner, terms, in the header",
    ),
    Part(
        f"{_OURS}.stores.redis.store",
        "RedisStore.take_claim",
        "the store: its command",
        step=_STORE,
    ),
    Part(
        f"{_OURS}.stores.redis.connection", "Connections.run", "connection, parsing", of_steps=True
    ),
    Part("redis.connection", "AbstractConnection.send_packed_command", "sending", of_steps=True),
    Part(
        "redis._parsers.socket",
        "SocketBuffer._read_from_socket",
        "waiting for the reply",
        of_steps=True,
    ),
)


def install(watch: Stopwatch) -> None:
    """Time all parts in this process from now on."""
    for part in PARTS:
        holder, name, function = find(part.module, part.path)
        timed = watch.around(function, part.name, step=part.step, of_steps=part.of_steps)
        setattr(holder, name, timed)


def is_celerys(name: str) -> bool:
    """Whether Celery does it when it publishes, with a claim or without."""
    return name.startswith(_CELERY)
