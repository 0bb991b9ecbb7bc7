"""Entries of a schedule: their options are checked when they are read, not when they are due.

An entry that can't be read is left out, and logged once. All other entries tick.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..policy import plain_call

logger = logging.getLogger("celery_singleton_lock")

# An entry of a task whose class isn't registered in the beat may contain its key.
_OF_THE_ENTRY: Final = ("key", "scope")

# The errors that were logged, by entry: schedulers read the same row or key again and again. A
# process has one scheduler.
_logged: Final[dict[str, str]] = {}


def checked_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The ``entries`` of a configuration with plain options, without those that can't be read."""
    checked: dict[str, Any] = {}
    for name, entry in entries.items():
        try:
            fields = dict(entry)  # a mapping, or an entry, which is made of its fields
            if fields.get("options"):
                fields["options"] = checked_options(fields["options"])
                entry = fields
        except (TypeError, ValueError) as exc:
            leave_out(name, exc)
        else:
            checked[name] = entry
    return checked


def checked_options(options: Any) -> dict[str, Any]:
    """The ``options`` of an entry, with ``singleton`` in types that JSON has.

    Raises:
        TypeError, ValueError: They can't be read, or ``singleton`` has a wrong option.
    """
    checked: dict[str, Any] = dict(options or {})
    if checked.get("headers"):
        checked["headers"] = dict(checked["headers"])
    singleton = checked.get("singleton")
    if singleton:
        own = {}
        if isinstance(singleton, Mapping):
            own = {option: singleton[option] for option in _OF_THE_ENTRY if option in singleton}
            singleton = {option: singleton[option] for option in singleton if option not in own}
        checked["singleton"] = own | plain_call(singleton, where="options['singleton']")
    return checked


def leave_out(name: str, error: Exception) -> None:
    """Log that the entry ``name`` does not tick, once for each error."""
    text = f"{type(error).__name__}: {error}"
    if _logged.get(name) != text:
        _logged[name] = text
        logger.error("singleton beat: the entry %r is left out: %s", name, text)
