"""What `celery report` and `celery inspect conf` show of our settings: not the store's URL.

Celery hides what it knows to hold passwords by the name of the setting, and cuts them out of its
own URLs. Reports are pasted into issues, and `inspect conf` answers whoever reaches the broker.
"""

from __future__ import annotations

import re

from celery.app import utils

__all__ = ["hide_store_url"]


def hide_store_url() -> None:
    """Add ``singleton_lock_url`` to the names whose values Celery shows as asterisks.

    Celery has no public API for this. This runs at import, so it does nothing, instead of failing,
    in a version of Celery that has no such pattern.
    """
    names = vars(utils)  # not in the stubs
    hidden, name = names.get("HIDDEN_SETTINGS"), "SINGLETON_LOCK_URL"
    if isinstance(hidden, re.Pattern) and name not in hidden.pattern:
        names["HIDDEN_SETTINGS"] = re.compile(f"{hidden.pattern}|{name}", hidden.flags)
