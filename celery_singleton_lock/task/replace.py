"""``on_duplicate="replace"`` and ``debounce``: a message runs with the arguments of the last call.

A later call replaces the arguments in the store (`publish.replace`). The grant of the
lease returns them. While a debounced message is not due, the store refuses the lease, and the
message is requeued until it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.keyspace import Keyspace
from ..core.lease import Lease
from ..core.store_requests import Acquire, Refused, Relation
from ..errors import LockKeyError
from ..message.arguments import call_of_arguments, unpack_arguments
from ..message.claim import Claim
from ..message.copy import why_not
from ..option_values import OnDuplicate
from ..run_feature import Feature, Run

logger = logging.getLogger("celery_singleton_lock")


class NewestArguments(Feature):
    """The arguments that later calls have given to the message of a run."""

    @classmethod
    def of(cls, run: Run) -> NewestArguments | None:
        """The newest arguments of the run's message; None: its policy replaces none."""
        replaces = run.claim is not None and run.policy.on_duplicate is OnDuplicate.REPLACE
        return cls(run) if replaces else None

    def prepare(self, request: Acquire) -> Acquire:
        """Ask for the newest arguments with the lease."""
        assert request.claim is not None
        arguments = Keyspace.arguments(request.claim.key, request.token.call_id)
        request.claim = replace(request.claim, arguments=arguments)
        return request

    def refused(self, refused: Refused) -> bool:
        """Requeue a message that is not due, without a conflict; else wait here."""
        if refused.relation is not Relation.NOT_DUE:
            return False
        run = self.run
        if why_not(run.task, run.request) is not None:
            run.runtime.clock.sleep(refused.due_in)
            return True
        delivery = replace(run.delivery, tries=-1)  # its copy has 0: it met no conflict
        run.requeue_in(delivery, refused.due_in, "debounce")

    def begin(
        self, lease: Lease | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of the last call that this message represents.

        Raises:
            ContentDisallowed, DecodeError: They can't be read.
            LockKeyError: They need another key, and the message can't be requeued.
        """
        run, claim = self.run, self.run.claim
        request = run.request
        packed = lease.arguments if lease is not None else None
        if packed is None and claim is not None and self._misses(claim):
            what = f"{run.task.name}[{request.id}] runs with the arguments of its message"
            logger.warning(
                "singleton: %s: the store has lost those of later calls, if there were any", what
            )
        if not packed or claim is None or (call := call_of_arguments(packed)) == claim.arguments:
            return args, kwargs  # a retry of this attempt has chosen its arguments
        newest, named, shown = unpack_arguments(packed, run.task.app.conf.accept_content)
        # Celery passes the request's own objects to signals and hooks when the task has ended.
        if isinstance(request.args, list) and isinstance(request.kwargs, dict):
            request.args[:] = newest
            request.kwargs.clear()
            request.kwargs.update(named)
        else:
            request.args, request.kwargs = newest, named
        request.argsrepr, request.kwargsrepr = shown.get("argsrepr"), shown.get("kwargsrepr")
        run.claim = replace(claim, arguments=call)
        run.delivery = replace(run.delivery, claim=run.claim.to_header())
        run.rewrite_header()
        if lease is not None:
            self._requeue_for_its_key(lease, newest, named)
        return newest, named

    def _misses(self, claim: Claim) -> bool:
        """Whether the store must have had the newest arguments, which it does not have now.

        Without a later call, they expire together with the claim before the first delivery.
        """
        if claim.arguments is None:
            return False
        delivery, until = self.run.delivery, claim.admitted_until
        if until is None or self.run.runtime.clock.wall() < until:
            return True
        token = delivery.token
        return bool(delivery.sequence or token.retries or token.nesting)

    def _requeue_for_its_key(
        self, lease: Lease, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Requeue the message if its newest arguments need another key than this lease's.

        To the publisher the keys were equal: it has an older key template, or no code of the task.

        Raises:
            LockKeyError: The message can't be requeued.
        """
        run = self.run
        if run.has_key_of(args, kwargs):
            return
        reason = "the newest arguments have another key"
        if (obstacle := why_not(run.task, run.request)) is not None:
            raise LockKeyError(f"{reason} than {run.key}, and {obstacle}")
        run.start_over(lease, reason)
