"""A message that the broker has given to a busy worker is not lost with that worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from .stage import open_stage, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

APP = "tests.apps.prefetch"


def test_a_message_popped_as_a_countdown_ends_survives_its_worker(
    redis_url: str, tmp_path: Path
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        worker = stage.worker(concurrency=1)
        # Until its countdown ends, the worker may have a message more, and has asked for it.
        stage.app.work.apply_async(("first",), countdown=1)
        stage.journal.wait_for_starts(1, key="first")
        clients = stage.redis.client_list()
        assert [c for c in clients if c["cmd"] == "brpop" and "b" in c["flags"]], clients
        stage.app.work.delay("second")
        wait_until(lambda: stage.redis.hlen("unacked") == 2, "the broker knows both", timeout=20.0)
        worker.kill_group()

        stage.open("first")
        stage.open("second")
        stage.worker(concurrency=1, env={"VISIBILITY_TIMEOUT": "1"})
        stage.journal.wait_for_ends(1, key="second")
