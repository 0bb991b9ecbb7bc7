"""Words that this project's prose does not use, and what it says instead."""

from __future__ import annotations

from typing import Final

#: Also looked for in comments, docstrings and scripts, by `tests/unit/test_prose.py`.
EVERYWHERE: Final = {
    "who waits": "the waiting client",
    "whoever": "the holder, or any client that",
    "nobody": "no client",
    "somebody": "a client",
    "anew": "again",
    "in vain": "without success",
    "shall": "must, or the present tense",
    "lest": "so that ... does not",
    "tells of": "reports",
    "hears of": "is notified of, or learns",
}

#: In the documentation.
DOCUMENTATION: Final = EVERYWHERE | {
    "tenure": "task run",
    "settlement": "outcome",
    "pulse": "parent heartbeat",
    "ledger": "shared memory",
    "silent": "that does not answer",
    "permit": "authorize",
    "lets go": "releases",
    "hand-made": "written by hand",
    "utilize": "use",
    "in order to": "to",
    "leverage": "use",
    "seamless(?:ly)?": "say what happens",
    "blazing": "say how fast",
}
