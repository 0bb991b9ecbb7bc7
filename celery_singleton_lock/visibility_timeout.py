"""After how long a broker delivers a message again that no worker has acknowledged."""

from __future__ import annotations

import re
from typing import Any, Final

from .option_values import seconds

# kombu's defaults, in seconds, for transports that deliver a message again if it is not
# acknowledged in time, by the first part of the broker URL's scheme. Redis:
# Channel.visibility_timeout; the others: Channel.default_visibility_timeout and
# default_peek_lock_seconds.
_VISIBILITY_TIMEOUTS: Final = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "sentinel", "sentinels"), 3600.0),
    **dict.fromkeys(("sqs", "slmq", "pgmq"), 1800.0),
    "azureservicebus": 60.0,
}


def visibility_timeout_of(conf: Any) -> float | None:
    """Seconds, by the configuration of an app; None: the broker has no such time.

    Raises:
        TypeError, ValueError: The transport option has a wrong value.
    """
    options = conf.get("broker_transport_options") or {}
    broker = conf.broker_url
    first = broker if isinstance(broker, str) else next(iter(broker or ()), "")
    transport = re.split(r"[+:]", first, maxsplit=1)[0].lower()
    option = "peek_lock_seconds" if transport == "azureservicebus" else "visibility_timeout"
    if option in options:
        return seconds(f"broker_transport_options[{option!r}]", options[option])
    return _VISIBILITY_TIMEOUTS.get(transport)
