"""The commands of the documentation show what it promises: most events are logged at INFO.

Celery's default level is WARNING, at which a skip, a requeue or an election shows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "example_project", "celery_singleton_lock/serve/monitoring")
KINDS = {".md", ".py", ".toml", ".yml", ".yaml", ".service", ".sh", ""}
# With quotes and commas between the words in a list of arguments.
STARTS = re.compile(
    r"""celery[ "',]+(?:-A|--app)[ ="',]+[\w.:]+(?![ "',]+singleton\b)"""
    r"""[^`\n|]*?[ "',](?:worker|beat)\b[^`\n|]*"""
)
SHOWS_TASKS = re.compile(r"""(?:-l|--loglevel)[ ="',]+(?:INFO|DEBUG)\b""", re.IGNORECASE)


def commands(text: str) -> list[str]:
    """The commands that start a worker or a beat."""
    return STARTS.findall(text.replace("\\\n", " "))


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        found = (path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
        yield from (path for path in found if path.is_file())


def test_each_command_that_starts_a_worker_or_a_beat_logs_at_info() -> None:
    found = {path: commands(path.read_text()) for path in pages()}
    assert len([one for some in found.values() for one in some]) > 20, "the pattern finds them"
    silent = [
        f"{path.relative_to(ROOT)}: {command}"
        for path, some in found.items()
        for command in some
        if not SHOWS_TASKS.search(command)
    ]
    assert not silent, "\n".join(silent)


def test_a_command_without_a_level_is_found() -> None:
    for text in (
        "`celery -A proj worker`",
        "celery --app=proj worker -c 4",
        'command: ["celery", "-A", "proj", "beat", "--scheduler", "singleton"]',
        "celery -A proj \\\n    worker -c 4",
    ):
        [command] = commands(text)
        assert not SHOWS_TASKS.search(command)
        [command] = commands(
            text.replace("worker", "worker -l INFO").replace("beat", "beat -l INFO")
        )
        assert SHOWS_TASKS.search(command)
    assert commands("celery -A proj singleton show celery.beat:proj") == []
