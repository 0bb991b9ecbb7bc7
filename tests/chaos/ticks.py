"""The app of a campaign's beats: `tests.apps.ticks`, with a part that is broken on purpose.

Its environment: that of `tests.apps.ticks`; CHAOS_BROKEN, see tests.chaos.broken.
"""

from __future__ import annotations

import os

from tests.apps.ticks import app
from tests.chaos import broken

__all__ = ["app"]

broken.break_on_purpose(os.environ.get("CHAOS_BROKEN", ""))
