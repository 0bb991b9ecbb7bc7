"""`python -m tests.benchmarks [NAME]`, as `stores` or `worker`; without a name, all of them."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from tests.benchmarks import instructions, publishing, queue, rate, stores
from tests.benchmarks.worker import command as worker

_BENCHMARKS: Final[dict[str, Any]] = {
    "stores": stores,
    "worker": worker,
    "publishing": publishing,
    "queue": queue,
    "rate": rate,
    "instructions": instructions,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module in _BENCHMARKS.items():
        module.add_options(commands.add_parser(name, description=module.__doc__))
    for arguments in [sys.argv[1:]] if sys.argv[1:] else [[name] for name in _BENCHMARKS]:
        options = parser.parse_args(arguments)
        _BENCHMARKS[options.benchmark].benchmark(options)


if __name__ == "__main__":
    main()
