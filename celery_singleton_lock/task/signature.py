"""Signatures of singleton tasks, whose option ``singleton`` every serializer can write."""

from __future__ import annotations

from typing import Any

from celery.canvas import Signature

from ..policy import plain_call

_OPTION = "singleton"


class SingletonSignature(Signature):
    """A signature of a singleton task, with plain options of the call.

    A signature may become a part of another message: a later link of a chain, the body of a chord,
    a ``link``. Celery serializes it there without asking the task, so timedeltas and rules are
    converted, and wrong options refused, when they are set. In a message it is Celery's Signature.
    """

    @classmethod
    def of(cls, signature: Any) -> Any:
        """``signature`` itself, as an instance of this class."""
        signature.__class__ = cls
        options = signature.options
        if _OPTION in options:
            options[_OPTION] = signature._plain(options[_OPTION])
        return signature

    def set(self, immutable: bool | None = None, **options: Any) -> Any:
        if _OPTION in options:
            options[_OPTION] = self._plain(options[_OPTION])
        return super().set(immutable, **options)

    def clone(self, args: Any = None, kwargs: Any = None, **opts: Any) -> Any:
        return self.of(super().clone(args, kwargs, **opts))

    partial = clone

    def _plain(self, options: Any) -> Any:
        if options is None or options is False:
            return options
        return plain_call(options, where=f"singleton=... in a signature of {self.task}")
