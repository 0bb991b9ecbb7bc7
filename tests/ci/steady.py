"""``make steady ARGS="path::test"``: a test twenty times, ten of them beside two busy loops.

Each run is a pytest of its own, without other tests beside it. The arguments are pytest's. The exit
status is 1 if a run failed; the output of the first that failed is printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

RUNS = 10
LOOPS = 2

_ROOT = Path(__file__).parents[2]

# It also ends by itself if this process is killed.
_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


def main(arguments: Sequence[str], runs: int = RUNS) -> int:
    """The exit status."""
    first = ""
    for kind, loops in (("quiet", 0), (f"beside {LOOPS} busy loops", LOOPS)):
        passed, seconds = 0, []
        with ExitStack() as stack:
            for _ in range(loops):
                stack.enter_context(busy_loop())
            for _ in range(runs):
                begin = time.monotonic()
                status, output = run(arguments)
                seconds.append(time.monotonic() - begin)
                passed += status == 0
                first = first or (output if status else "")
                if status > 1:  # no test of this name, or a wrong option: it stays so
                    print(output)
                    return status
        print(f"{kind}: {passed} of {runs} passed, the longest in {max(seconds):.1f} s", flush=True)
    if first:
        print(f"\nthe first that failed:\n{first}")
    return 1 if first else 0


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the tests once; the exit status of pytest and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *arguments],
        cwd=_ROOT,
        env={**os.environ, "CI": "true"},  # a missing server is a failure, no skip
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


@contextmanager
def busy_loop() -> Iterator[int]:
    """A process that computes and does nothing else; its process id."""
    process = subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
