"""A task's signature, the validation of its key, and its arguments after serialization."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from kombu import serialization
from kombu.exceptions import KombuError

from celery_singleton_lock.core.key import SCALARS, KeyMaker
from celery_singleton_lock.errors import LockKeyError
from celery_singleton_lock.policy import Policy, merge

_TEXT: Final = frozenset({str})
# The types that may be iterated. Iterating another type may exhaust it.
_SEQUENCES: Final = frozenset({list, tuple})


def validate(
    policy: Mapping[str, Any], name: str, body: Callable[..., Any], *, is_bound: bool
) -> None:
    """Check the ``policy`` of the task ``name``.

    Args:
        policy: The options of the policy.
        name: The name of the task in errors.
        body: The function that the task runs.
        is_bound: Whether its first argument is the task, which callers do not give.

    Raises:
        TypeError, ValueError: An option is wrong, or the key doesn't fit the signature.
    """
    where = f"@singleton_task on {name}"
    merged = merge(Policy(), policy, where=where)
    signature = inspect.signature(body)
    if is_bound:
        parameters = list(signature.parameters.values())[1:]
        signature = signature.replace(parameters=parameters)
    try:
        KeyMaker(merged.key, signature, json.dumps)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{where}: {exc}") from None


def as_sent(args: Any, kwargs: Any, serializer: str = "json") -> tuple[Any, Any]:
    """The arguments as a worker gets them: serialization converts tuples to lists, and so on.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        serializer: kombu's name of the message's serializer.
    """
    if serializer == "json" and _are_scalars(args, kwargs):
        return args, kwargs
    arguments = [list(args), dict(kwargs)]
    try:
        content_type, encoding, data = serialization.dumps(arguments, serializer)
        sent, named = serialization.loads(data, content_type, encoding, accept={content_type})
    except (TypeError, ValueError, KombuError):
        return args, kwargs  # publishing will raise
    return sent, named


def _are_scalars(args: Any, kwargs: Any) -> bool:
    """Whether JSON keeps the arguments unchanged. A JSON round trip is half of a claim's cost."""
    if type(args) not in _SEQUENCES or not SCALARS.issuperset(map(type, args)):
        return False
    return not kwargs or (
        type(kwargs) is dict
        and SCALARS.issuperset(map(type, kwargs.values()))
        and _TEXT.issuperset(map(type, kwargs))
    )


def stable_rest(key_maker: KeyMaker, args: Any, kwargs: Any, serializer: str) -> str | None:
    """The key's text for a call as a worker gets it, checked to be stable.

    Raises:
        LockKeyError: Reading one message twice yields two keys, so no duplicate would be found.
    """
    seen = as_sent(args, kwargs, serializer)
    rest = key_maker(*seen)
    if serializer == "json" and not callable(key_maker.spec):
        return rest  # templates and digests of plain data are stable
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
