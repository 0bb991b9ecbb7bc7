"""A task's arguments: its signature, its key checked against it, what a message makes of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from kombu import serialization
from kombu.exceptions import KombuError
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from celery_singleton_lock.core.key import SCALARS, KeyMaker
from celery_singleton_lock.errors import LockKeyError
from celery_singleton_lock.policy import Policy, merge

__all__ = ["as_sent", "signature_of", "signature_without_self", "stable_rest", "validate"]

_TEXT: Final = frozenset({str})
# Of another sort, looking may use it up.
_SEQUENCES: Final = frozenset({list, tuple})


def validate(policy: Mapping[str, Any], signature: inspect.Signature, name: str) -> None:
    """Check the ``policy`` of the task ``name``, whose body has ``signature``.

    Raises:
        TypeError, ValueError: An option is wrong, or the key doesn't fit the signature.
    """
    where = f"@singleton_task on {name}"
    merged = merge(Policy(), policy, where=where)
    try:
        KeyMaker(merged.key, signature, json.dumps)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{where}: {exc}") from None


def signature_of(cls: Any) -> inspect.Signature:
    is_static = isinstance(inspect.getattr_static(cls, "run"), staticmethod)
    return signature_without_self(cls.run, not is_static)


def signature_without_self(fun: Callable[..., Any], bound: bool) -> inspect.Signature:
    """What a caller of ``fun`` gives; a ``bound`` one gets its task before that."""
    signature = inspect.signature(fun)
    if not bound:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def as_sent(args: Any, kwargs: Any, serializer: str = "json") -> tuple[Any, Any]:
    """The arguments as a worker sees them: a message makes lists of tuples, and so on.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        serializer: Of the message, by kombu's name.
    """
    if serializer == "json" and _are_scalars(args, kwargs):
        return args, kwargs
    arguments = [list(args), dict(kwargs)]
    try:
        if serializer == "json":
            sent, named = kombu_loads(kombu_dumps(arguments))
        else:
            content_type, encoding, data = serialization.dumps(arguments, serializer)
            sent, named = serialization.loads(data, content_type, encoding, accept={content_type})
    except (TypeError, ValueError, KombuError):
        return args, kwargs  # publishing will say what is wrong with them
    return sent, named


def _are_scalars(args: Any, kwargs: Any) -> bool:
    """Whether JSON gives these back as they are: to ask it would be half of what a claim costs."""
    if type(args) not in _SEQUENCES or not SCALARS.issuperset(map(type, args)):
        return False
    return not kwargs or (
        type(kwargs) is dict
        and SCALARS.issuperset(map(type, kwargs.values()))
        and _TEXT.issuperset(map(type, kwargs))
    )


def stable_rest(key_maker: KeyMaker, args: Any, kwargs: Any, serializer: str) -> str | None:
    """What ``key_maker`` makes of a call as a worker sees it, once it is sure to do so again.

    Raises:
        LockKeyError: Two readings of one message make two keys: a duplicate would not be known.
    """
    seen = as_sent(args, kwargs, serializer)
    rest = key_maker(*seen)
    if serializer == "json" and not callable(key_maker.spec):
        return rest  # plain data, and templates and digests of such are functions of it
    seen_again = as_sent(args, kwargs, serializer)
    again = key_maker(*seen_again)
    if again == rest:
        return rest
    raise LockKeyError(
        f"the key of this call is not stable: read twice from its message, it was {rest!r} and "
        f"{again!r}. {_culprit(key_maker, seen, seen_again)}"
    )


def _culprit(key_maker: KeyMaker, seen: Any, seen_again: Any) -> str:
    one, other = key_maker.bind(*seen), key_maker.bind(*seen_again)
    for name, value in one.items():
        if str(value) != str(other[name]):
            return (
                f"Argument {name!r} ({type(value).__name__}) has another text each time: give it a "
                "__str__, or make the key of other arguments"
            )
    spec = key_maker.spec
    name = getattr(spec, "__name__", repr(spec))
    return f"The arguments are the same each time: make {name} depend on nothing else"
