"""How `watch` ends, whatever its libraries do with the exception of a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from celery_singleton_lock.cli.watch import _until_interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_quietly(number: signal.Signals) -> None:
    with _until_interrupted():
        os.kill(os.getpid(), number)
        time.sleep(60)
        pytest.fail("the signal came")


@pytest.mark.parametrize("number", SIGNALS)
def test_an_exception_that_a_library_swallows_ends_the_next_round(number: signal.Signals) -> None:
    with _until_interrupted() as goes_on:
        assert goes_on()
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except BaseException:
            pass
        assert not goes_on()
