"""Words that this project's prose does not use, and what it says instead."""

from __future__ import annotations

from typing import Final

#: Also looked for in code, by `tests/unit/test_prose.py`: names, comments, docstrings and scripts.
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
    "tenure": "task run",
    "settlement": "outcome",
    "pulse": "parent heartbeat",
    "ledger": "shared memory, or lease note",
    "keeper": "heartbeat",
    "posted": "asynchronous, or pending",
    "heard": "received, or notified",
}

#: Where one of these words is something else: a phrase with it, by file.
ALLOWED: Final = {
    "tests/contract/test_wait_queue_safety.py": "whoever has waited longest",  # of version 0.2
}

#: In the documentation.
DOCUMENTATION: Final = EVERYWHERE | {
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
