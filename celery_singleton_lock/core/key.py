"""Computation of lock keys: the arguments of a call become one key in the store.

Equal calls have equal keys, on the publisher as on the worker: positional or keyword arguments,
defaults given or left out, dicts in any order, tuple or list. The arguments are bound to the
signature, defaults are applied, and each value counts as a message would transport it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import isfinite
from typing import Any, Final

from ..errors import LockKeyError
from .keyspace import digest

# json.dumps(sort_keys=True) makes a new encoder for each call.
_sorted_json: Final = json.JSONEncoder(sort_keys=True).encode


# The encoder's output for a single value of the most frequent types, at a fifth of the cost.
_TEXT_OF: Final[Mapping[type, Callable[[Any], str]]] = {
    str: json.encoder.encode_basestring_ascii,
    int: int.__repr__,
    float: lambda value: repr(value) if isfinite(value) else _sorted_json(value),
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}
#: The types that JSON transports unchanged. An argument of another type goes through the encoder of
#: kombu; a type for which users register an encoder there needs nothing here.
SCALARS: Final = frozenset(_TEXT_OF)


class PerTask:
    """The ``key`` that gives the whole task one key, whatever its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PER_TASK"


#: Pass this as ``key`` to lock the whole task, whatever its arguments.
PER_TASK: Final = PerTask()

#: The values of a policy's ``key``; None means all bound arguments.
KeySpec = str | tuple[str, ...] | PerTask | Callable[..., "str | None"] | None

# The parameters of a wrapper that passes its arguments on: ``*args, **kwargs``.
_OPEN: Final = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


def _binder(signature: inspect.Signature) -> Callable[..., dict[str, Any]]:
    """A function that takes these parameters, and returns their values by name.

    The interpreter binds arguments at a tenth of the cost of ``inspect``.
    """
    defaults: list[Any] = []
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.default is not parameter.empty:
            defaults.append(parameter.default)
            parameter = parameter.replace(default=_Verbatim(f"defaults[{len(defaults) - 1}]"))
        parameters.append(parameter.replace(annotation=parameter.empty))
    names = str(inspect.Signature(parameters))[1:-1]
    own = "_".join(("locals", *signature.parameters))  # longer than any parameter's name
    bind: Callable[..., dict[str, Any]]
    bind = eval(f"lambda {names}: {own}()", {"defaults": defaults, own: locals})
    return bind


def signature_of(body: Callable[..., Any], *, is_bound: bool = False) -> inspect.Signature:
    """The signature of the calls of a task's ``body``, which decorators may have wrapped.

    A wrapper with ``*args`` and ``**kwargs`` passes its arguments on, so the signature is that of
    the function which functools.wraps has recorded. A wrapper that declares all its parameters may
    call that function with others (a database session, for example): calls fit the wrapper.

    Args:
        body: A function or a bound method.
        is_bound: Whether callers do not give the first argument, the task.
    """
    found = inspect.unwrap(body, stop=lambda step: inspect.ismethod(step) or not _is_open(step))
    if inspect.ismethod(found):
        return signature_of(found.__func__, is_bound=True)
    signature = inspect.signature(found, follow_wrapped=False)
    parameters = list(signature.parameters.values())
    if is_bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        return signature.replace(parameters=parameters[1:])
    return signature


def _is_open(function: Callable[..., Any]) -> bool:
    """Whether ``function`` takes both ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {parameter.kind for parameter in parameters} >= _OPEN


class KeyMaker:
    """Computes the suffix of a lock key from the arguments of a call.

    Args:
        spec: The policy's ``key``.
        signature: The signature of the task's body, without a bound ``self``.
        dumps: The serialiser's JSON encoder, which defines how a message transports an argument.

    Attributes:
        spec: The policy's ``key``.
        key_suffix: A function of args and kwargs: the key of this call, or None if a callable key
            says "no lock for this call". It raises TypeError if the arguments don't fit the
            signature, and LockKeyError if an argument has no JSON form, or the template or callable
            failed.

    Raises:
        TypeError: ``spec`` has an unsupported type.
        ValueError: The template has no placeholder, or names an argument that does not exist.
    """

    __slots__ = ("_binder", "_collector", "_dumps", "_signature", "key_suffix", "spec")

    @property
    def names_all(self) -> bool:
        """Whether calls with one key have the same arguments, as far as ``spec`` shows it."""
        if self.spec is None or not self._signature.parameters:
            return True
        if not isinstance(self.spec, (str, tuple)):
            return False
        named = self.spec
        if isinstance(named, str):
            named = tuple(str(field) for _, field, _, _ in string.Formatter().parse(named))
        return set(self._signature.parameters) <= set(named)

    def __init__(
        self, spec: KeySpec, signature: inspect.Signature, dumps: Callable[[Any], str]
    ) -> None:
        self.spec = spec
        self._signature = signature
        self._binder = _binder(signature)
        parameters = signature.parameters.values()
        # The name of the ``**`` parameter.
        self._collector = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._dumps = dumps
        self.key_suffix = self._compile(spec)

    def _compile(self, spec: KeySpec) -> Callable[[Sequence[Any], Mapping[str, Any]], str | None]:
        if spec is None:
            return self._digest_of_all
        if isinstance(spec, PerTask):
            return lambda args, kwargs: "*"
        if isinstance(spec, str):
            return _Template(spec, self._signature, self.bind).render
        if isinstance(spec, tuple):
            if not spec:
                raise ValueError("key=() names no argument; for one key per task: key=PER_TASK")
            for name in spec:
                _check_name(name, self._signature, f"key={spec!r}")
            return partial(self._digest_of_some, spec)
        if callable(spec):
            return partial(_call, spec)
        raise TypeError(
            f"key={spec!r} is a {type(spec).__name__}; write a template such as "
            '"account:{account_id}", a tuple of argument names, PER_TASK or a callable'
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults applied; TypeError if they don't fit the signature.

        Arguments that ``**`` collects are in the result twice: as a dict under the name of that
        parameter, and each under its own name. A parameter takes precedence over an item of the
        same name: for ``f(1, a=2)`` of ``def f(a, /, **options)``, ``a`` is 1.
        """
        try:
            found = self._binder(*args, **kwargs)
        except TypeError:
            try:
                self._signature.bind(*args, **kwargs)  # raises an error that says what does not fit
            except TypeError as exc:
                raise TypeError(f"{exc}: the task takes {self._signature}") from None
            raise
        return found if self._collector is None else {**found[self._collector], **found}

    def _digest_of_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        arguments = self.bind(args, kwargs)
        if self._collector is None:
            return digest(self._text_of(arguments))
        names, collected = self._signature.parameters, arguments[self._collector]
        declared = {name: arguments[name] for name in names if name != self._collector}
        if declared.keys().isdisjoint(collected) and not any("\n" in name for name in collected):
            return digest(self._text_of(declared | collected))
        # Quote names that could be taken for a parameter's name or for several lines. The first
        # line contains no "=", so no other call's text can begin with it.
        quoted = {_sorted_json(name): value for name, value in collected.items()}
        return digest(f"**\n{self._text_of(declared | quoted)}")

    def _digest_of_some(
        self, names: tuple[str, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        arguments = self.bind(args, kwargs)
        # An item of ``**`` that a call omits counts as None.
        return digest(self._text_of({name: arguments.get(name) for name in names}))

    def _text_of(self, arguments: dict[str, Any]) -> str:
        """One line for each argument."""
        parts = []
        for name in sorted(arguments):
            value = arguments[name]
            text_of = _TEXT_OF.get(type(value))
            try:
                if text_of is None:
                    # Encoding and decoding makes tuple and list equal, as a message does.
                    value, text_of = json.loads(self._dumps(value)), _sorted_json
                parts.append(f"{name}={text_of(value)}")
            except (TypeError, ValueError, RecursionError) as exc:
                raise LockKeyError(
                    f"argument {name!r} ({type(arguments[name]).__name__}) can't be part of a lock "
                    f"key: {exc}. Leave it out with key=(names of the others) or compute the key "
                    "with a callable."
                ) from exc
        return "\n".join(parts)


def _call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    name = getattr(function, "__name__", repr(function))
    try:
        key = function(*args, **kwargs)
    except Exception as exc:
        hint = ""
        if isinstance(exc, AttributeError) and isinstance(getattr(exc, "obj", None), dict):
            # The message of a pydantic task has a dict in place of the model.
            hint = (
                f'. The message has a dict: write [{exc.name!r}], or a template "{{x.{exc.name}}}"'
            )
        raise LockKeyError(f"the key function {name} raised {exc!r}{hint}") from exc
    if key is None or (isinstance(key, str) and key):
        return key
    raise LockKeyError(
        f"the key function {name} returned {key!r}; return a non-empty str, or None for no lock"
    )


def _check_name(name: str, signature: inspect.Signature, where: str) -> None:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if name in signature.parameters:
        return
    if kinds >= _OPEN:
        # A positional argument has no name there: calls with different ones would share a key.
        raise ValueError(
            f"{where} names {name!r}, which the task does not declare, and an argument in *args "
            "has no name: declare the parameter. If the task is a decorator's wrapper, put "
            "functools.wraps(function) on it"
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    known = ", ".join(signature.parameters) or "none"
    raise ValueError(f"{where} names {name!r}, which is no argument of the task (it has: {known})")


def can_be_key_suffix(spec: KeySpec, suffix: str) -> bool:
    """Whether a task with the ``key`` of this ``spec`` can have a key with this ``suffix``.

    ``suffix`` is plain text, as `KeyMaker.key_suffix` returns it. A callable may return any text.
    """
    return callable(spec) or _suffixes_of(spec).fullmatch(suffix) is not None


@lru_cache(maxsize=256)
def _suffixes_of(spec: str | tuple[str, ...] | PerTask | None) -> re.Pattern[str]:
    if isinstance(spec, PerTask):
        return re.compile(r"\*")
    if isinstance(spec, str):
        literals = _literals(list(string.Formatter().parse(spec)))
        return re.compile(f"(?s:{'.*'.join(map(re.escape, literals))})")
    return re.compile("[0-9a-f]{32}")  # see `digest`


class _Template(string.Formatter):
    """A key template. ``{order.account_id}`` reads an attribute, or a mapping's item.

    The worker of a pydantic task has a dict where its publisher had a model.
    """

    def __init__(
        self, template: str, signature: inspect.Signature, bind: Callable[..., dict[str, Any]]
    ) -> None:
        self._template, self._bind = template, bind
        try:
            pieces = list(self.parse(template))
        except ValueError as exc:  # a brace without the other one
            raise ValueError(f"key={template!r}: {exc}") from None
        fields = [field for _, field, _, _ in pieces if field is not None]
        if not fields:
            raise ValueError(
                f"key={template!r} has no placeholder, so all calls would share it; write "
                'something like "account:{account_id}", or key=PER_TASK if that is meant'
            )
        for field in fields:
            name = re.split(r"[.\[]", field, maxsplit=1)[0]
            if not name or name.isdigit():
                raise ValueError(f"key={template!r}: name the argument in {{{field}}}")
            _check_name(name, signature, f"key={template!r}")
        literals = _literals(pieces)
        for literal, following in zip(literals[1:], fields[1:], strict=False):
            if not literal:
                raise ValueError(
                    f"key={template!r}: put a separator before {{{following}}}; without one, "
                    "different arguments would render to the same key"
                )
        # If all fields are bare names, the parsed pieces are kept. `string.Formatter` would parse
        # the template at each call, which is half of the cost of a key.
        bare = all(map(str.isidentifier, fields)) and not any(
            spec or conversion for _, _, spec, conversion in pieces
        )
        self._plain = [(literal, field) for literal, field, _, _ in pieces] if bare else None
        # With two placeholders, ("a:b", "c") and ("a", "b:c") must not both render to "a:b:c".
        self._escapes = _escapes(literals) if len(fields) > 1 else {}

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        arguments = self._bind(args, kwargs)
        try:
            if self._plain is None:
                return self.vformat(self._template, (), arguments)
            text = ""
            for literal, name in self._plain:
                text += literal
                if name is not None:
                    text += self.format_field(arguments[name], "")
            return text
        except Exception as exc:
            raise LockKeyError(
                f"key={self._template!r} can't be rendered from the arguments: {exc!r}"
            ) from exc

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, *steps = re.split(r"[.\[]", field_name.replace("]", ""))
        value = self.get_value(first, args, kwargs)
        for step in steps:
            value = _step_into(value, step)
        return value, first

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_ordered(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value.__class__ in _ORDERED:
            value = _ordered(value)
        if self._escapes:
            return format(value, format_spec).translate(self._escapes)
        return format(value, format_spec)


def _literals(pieces: Sequence[Any]) -> list[str]:
    """The text of a template before, between and after its placeholders."""
    literals = [""]
    for literal, field, _, _ in pieces:  # an escaped brace also ends a piece
        literals[-1] += literal
        if field is not None:
            literals.append("")
    return literals


def _escapes(literals: Sequence[str]) -> dict[int, str]:
    """The escape in a value for each character of the template's own text.

    A value ends where a separator begins. So no separator may begin with the character that begins
    escapes, and no escape may be a prefix of another one: "!" is 21 and an arrow is 2192.
    """
    begins = {separator[0] for separator in literals[1:-1]}
    lead = next(c for c in map(chr, itertools.count(ord("%"))) if c not in begins)
    escaped = {lead, *"".join(literals)}
    codes = {f"{ord(c):02X}" for c in escaped}
    is_ambiguous = any(one != other and other.startswith(one) for one in codes for other in codes)
    digits = 6 if is_ambiguous else 2
    return {ord(c): f"{lead}{ord(c):0{digits}X}" for c in escaped}


# The types of plain data that are, or may contain, a dict or a set.
_ORDERED: Final[frozenset[type]] = frozenset({dict, set, frozenset, list, tuple})


def _ordered(value: Any) -> Any:
    """``value`` with the items of its dicts and sets sorted, so that equal values render alike.

    A dict has the order in which its caller wrote it. A set of strings has another order in each
    process.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_ordered, value))
    if kind is dict:
        items = [(_ordered(key), _ordered(item)) for key, item in value.items()]
        items.sort(key=lambda pair: _rank(pair[0]))
        return _Verbatim(f"{{{', '.join(f'{key!r}: {item!r}' for key, item in items)}}}")
    if (kind is set or kind is frozenset) and value:
        text = f"{{{', '.join(map(repr, sorted(map(_ordered, value), key=_rank)))}}}"
        return _Verbatim(text if kind is set else f"frozenset({text})")
    return value


def _rank(value: Any) -> tuple[int, int, str]:
    """Sort key: integers by value, then all others by text; different types don't compare."""
    return (0, value, "") if type(value) is int else (1, 0, repr(value))


class _Verbatim(str):
    """A string that renders without quotes inside a list."""

    __slots__ = ()
    __repr__ = str.__str__


def _step_into(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value[step]
    if isinstance(value, (list, tuple)) and step.isdigit():
        return value[int(step)]
    return getattr(value, step)
