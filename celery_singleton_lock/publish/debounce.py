"""``debounce``: when a message may start, and Celery's options that contradict it.

Each later call postpones the start (`publish.replace`). A message that is not due is requeued
(`task.replace`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

from ..message.times import seconds_until
from ..policy import Policy


def first_countdown(debounce: float, longest: float | None) -> float:
    """The countdown of a debounced message; a worker requeues it if it is not due then.

    Args:
        debounce: Seconds.
        longest: The longest countdown that is shorter than the broker's visibility timeout, in
            seconds; None: there is no such timeout. Copies of requeues have the same limit.
    """
    return debounce if longest is None else min(debounce, longest)


def check_debounce(
    task: str, policy: Policy, options: Mapping[str, Any], expires: Any, app: Celery
) -> None:
    """Refuse Celery's options that contradict ``debounce``.

    Args:
        task: The name of the task.
        policy: Its policy, with the options of the call.
        options: Celery's options of the call.
        expires: Celery's ``expires`` of the call or the task.
        app: The publisher's app.

    Raises:
        ValueError: The call sets another time, or expires before it may run.
    """
    for name in ("countdown", "eta"):
        if options.get(name) is not None:
            raise ValueError(
                f"{task}: {name}={options[name]!r} with debounce={policy.debounce:g}: the "
                f"debounce decides when the call runs. Leave {name} out, or turn debounce off "
                'for this call: singleton={"debounce": None, "debounce_max": None}'
            )
    if expires is None:
        return
    where = f"{task}: expires={expires!r} with debounce={policy.debounce:g}"
    latest = policy.debounce_max
    if latest is None:
        raise ValueError(
            f"{where}: without debounce_max, later calls may postpone the run beyond any "
            "expires, and the newest arguments would be lost. Give a debounce_max, or no "
            "expires"
        )
    if (seconds_until(expires, app) or 0.0) <= latest:
        raise ValueError(
            f"{where}: the message may expire before it runs, {latest:g} s after the call or "
            "later, and the newest arguments would be lost. Give a later expires, or none"
        )
