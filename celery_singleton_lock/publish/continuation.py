"""A message that continues the running one under its id: a retry, or ``self.replace()``."""

from __future__ import annotations

from typing import Any

from ..message.claim import Claim
from ..message.request_data import RequestData
from ..option_values import Unique
from ..policy import Policy
from ..runtime import Runtime


def carry_claim(
    runtime: Runtime, request: Any, header: dict[str, Any], task: str, key: str, policy: Policy
) -> None:
    """Pass the claim of ``request`` to the message that continues it, without a request."""
    data = RequestData.of(request)
    run, claim = data.run, None
    if run is not None and (run.task.name, run.key) == (task, key):
        claim = run.claim  # with the key that its publisher computed
    if claim is None:
        if policy.unique is Unique.UNTIL_EXPIRED:
            return  # the period is that of its first message
        claim = Claim.of(policy, runtime.keyspace.claim(task, key))
    header["claim"] = claim.to_header()
    data.continued = claim.key


def continues(running: Any, task_id: str) -> bool:
    """Whether the message ``task_id`` continues the ``running`` task: a retry or replace."""
    return running is not None and str(running.request.id) == task_id
