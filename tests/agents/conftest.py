"""Collected only where the agents are installed: in the environment of `make test-agents`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ddtrace") else ["test_*.py"]
