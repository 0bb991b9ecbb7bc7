"""For Python under libfaketime, which answers EINVAL where time.sleep waits until a moment.

(It takes the moment, of CLOCK_MONOTONIC, for one of the clock that it fakes: libfaketime 0.9.10.)
The directory of this file is on the PYTHONPATH of the processes of a host with a clock of its own.
"""

from __future__ import annotations

import select
import time
from typing import Any


def _sleep(seconds: Any) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select((), (), (), seconds)


time.sleep = _sleep
