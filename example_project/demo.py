"""`python -m example_project.demo`: the same work with the lock and without it, live.

Exit status 1 if, with the lock, two runs of one key overlapped, a job was lost, a scheduled run was
sent twice, or no run came after the last call of the burst. Also if nothing overlapped or doubled
without the lock, because then the demo has shown nothing.
"""

import argparse
import signal
import sys
from pathlib import Path

from example_project.private_server import find_server
from example_project.scenario import Scenario
from example_project.screen import open_screen
from example_project.snapshot import Outcome
from example_project.timeline import draw
from example_project.verdict import faults, figures, summary, table

#: What an earlier run left in its directory.
LEFTOVERS = ("journal.jsonl", "bank.sqlite3*", "beat-*-schedule*", "*.log")


def main() -> int:
    options = _options()
    # Ends the workers too when the demo is stopped from outside, by `timeout` or a CI job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / ".gitignore").write_text("*\n")

    locked = _run(options.out / "with-lock", locked=True, seconds=options.seconds)
    unlocked = _run(options.out / "without-lock", locked=False, seconds=options.seconds)

    picture = options.out / "timeline.svg"
    picture.write_text(draw([locked, unlocked]))
    with_lock, without = figures(locked), figures(unlocked)
    print(table(with_lock, without))
    print(f"\n{summary(with_lock)}")
    print(f"without the lock: {summary(without)}")
    print(f"picture: {picture}")
    found = list(faults(with_lock, without))
    for fault in found:
        print(f"FAILED:  {fault}", file=sys.stderr)
    return 1 if found else 0


def _run(directory: Path, *, locked: bool, seconds: float) -> Outcome:
    """One run on a server of its own, so that nothing of an earlier run can help or hinder."""
    directory.mkdir(exist_ok=True)
    for pattern in LEFTOVERS:
        for leftover in directory.glob(pattern):
            leftover.unlink()
    server = find_server()
    screen = open_screen()
    try:
        server.start()
        print(f"\nThe run {'with' if locked else 'without'} the lock\n", flush=True)
        return Scenario(
            redis_url=server.url(),
            directory=directory,
            locked=locked,
            seconds=seconds,
            show=screen.show,
        ).run()
    finally:
        screen.close()
        server.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=8, help="how long each run sends calls (default: 8)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-output"),
        help="where journals, logs and the picture go",
    )
    options = parser.parse_args()
    if options.seconds < 6:
        parser.error(
            "--seconds must be at least 6: the kill needs an import to hit, and time to recover"
        )
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
