"""`python -m tests.benchmarks [stores] [options]`; without a name, all of them."""

from __future__ import annotations

import argparse

from tests.benchmarks import stores


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description=__doc__)
    parser.add_argument("benchmark", nargs="?", choices=["stores"], default="stores")
    stores.add_options(parser)
    stores.benchmark(parser.parse_args())


if __name__ == "__main__":
    main()
