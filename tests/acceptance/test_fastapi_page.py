"""The example of docs/how-to/fastapi.md, in a real ASGI server."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import hold
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import free_port
from tests.acceptance.test_readme import README
from tests.harness.pages import block_with
from tests.harness.processes import ROOT, Process
from tests.integration.stage import PATIENCE, wait_until

Post = Callable[[str], tuple[int, Any, "http.client.HTTPMessage"]]


@pytest.fixture(scope="module")
def redis_url(redis_server: Any, _databases: Iterator[int]) -> str:
    """A database for all tests of the module, which use different accounts."""
    url: str = redis_server.url(next(_databases))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Path:
    """A folder with the README's tasks.py and the page's web.py, on the module's server."""
    tmp_path = tmp_path_factory.mktemp("site")
    tasks = re.sub(r"redis://localhost:6379/\d", redis_url, block_with(README, "# tasks.py"))
    (tmp_path / "tasks.py").write_text(tasks)
    page = (ROOT / "docs/how-to/fastapi.md").read_text()
    (tmp_path / "web.py").write_text(block_with(page, "# web.py"))
    return tmp_path


@pytest.fixture(scope="module")
def post(example: Path) -> Iterator[Post]:
    port = free_port()
    server = Process(
        [sys.executable, "-m", "uvicorn", "web:web", "--port", str(port)],
        env={"PYTHONPATH": f"{example}{os.pathsep}{ROOT}"},
        name="uvicorn",
        cwd=example,
    )

    def post(path: str) -> tuple[int, Any, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers

    server.start()
    try:
        server.wait_for_log("Uvicorn running")
        yield post
        server.terminate()
        server.wait_for_log("Finished server process")
    finally:
        server.kill_group()
        print(server.log)


@pytest.fixture
def holder(redis_url: str) -> Iterator[Celery]:
    """Another process's app, as the locks see it."""
    app = Celery("holder", broker=redis_url, backend=redis_url, set_as_current=False)
    yield app
    Runtime.of(app).close()
    app.close()


def test_requests_for_one_key_take_turns_or_get_409_and_an_unrelated_one_is_not_delayed(
    post: Post, holder: Celery, redis_client: redis.Redis
) -> None:
    database = str(redis_client.connection_pool.connection_kwargs["db"])

    def blocked() -> int:
        clients = redis_client.client_list()
        return sum(client["cmd"] == "blpop" and client["db"] == database for client in clients)

    with ThreadPoolExecutor(2) as clients:
        with hold("account:1", scope="tasks.sync", app=holder) as lease:
            waiting = [clients.submit(post, "/accounts/1/close?wait=60") for _ in range(2)]
            wait_until(lambda: blocked() == 2, "both requests wait")
            status, answer, headers = post("/accounts/1/close")
            assert (status, headers["Retry-After"]) == (409, "2")
            assert answer["holder"]["task_id"] == lease.token.task_id
            assert post("/accounts/2/close")[0] == 200
            assert not any(request.done() for request in waiting)
        done = [request.result(PATIENCE) for request in waiting]
    assert [status for status, *_ in done] == [200, 200]
    first, second = sorted((answer for _, answer, _ in done), key=lambda answer: answer["began"])
    assert lease.fence < first["fence"] < second["fence"]
    assert first["ended"] <= second["began"]


def test_two_requests_publish_one_message(post: Post, redis_client: redis.Redis) -> None:
    first, second = (post("/accounts/7/sync") for _ in range(2))
    assert (first[0], second[0]) == (202, 202)
    assert first[1] == second[1]
    assert redis_client.llen("celery") == 1


def test_a_wait_out_of_bounds_is_the_clients_error(post: Post) -> None:
    for wait in ("-1", "nan", "inf", "-inf", "1e308", "61", "soon", ""):
        assert post(f"/accounts/1/close?wait={wait}")[0] == 422


def test_an_id_out_of_bounds_is_the_clients_error(post: Post) -> None:
    for account in ("-1", "0", "1.5", "nan", f"{2**63}", "9" * 5000):
        assert post(f"/accounts/{account}/close")[0] == 422
        assert post(f"/accounts/{account}/sync")[0] == 422
    assert post(f"/accounts/{2**63 - 1}/close")[0] == 200
