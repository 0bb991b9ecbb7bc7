"""The page of `celery singleton serve` in a real browser."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import hold, pause, resume
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store_requests import Acquire
from celery_singleton_lock.message.skipped import skipped_value
from celery_singleton_lock.runtime import Runtime
from tests.harness.app_module import fresh_module
from tests.harness.browser import requested
from tests.harness.deliveries import wait_until
from tests.harness.journal import VARIABLE
from tests.harness.serve import ServeProcess

pytestmark = pytest.mark.slow

POOLS = "tests.apps.pools"
TOKEN = secrets.token_hex(16)
HOSTILE = '<img src=x onerror="window.hacked=1"></td><script>window.hacked=1</script>\'"&amp;'


class Page:
    """The page in a browser, as a person uses it."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def open(self, url: str) -> None:
        self._browser.get(url)
        self.run("window.isFirstLoad = true")

    def run(self, script: str, *arguments: Any) -> Any:
        return self._browser.execute_script(script, *arguments)

    @property
    def is_first_load(self) -> bool:
        return bool(self.run("return window.isFirstLoad === true"))

    @property
    def rows(self) -> list[str]:
        """The text of each row."""
        script = "return [...document.querySelectorAll('#keys tr')].map((row) => row.innerText)"
        found: list[str] = self.run(script)
        return found

    def text(self, id_: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).innerText", id_))

    def element(self, id_: str) -> Any:
        return self._browser.find_element("id", id_)

    def type(self, id_: str, text: str) -> None:
        field = self.element(id_)
        field.clear()
        field.send_keys(text)

    def wait_for_row(self, *words: str) -> None:
        wait_until(lambda: any(all(w in row for w in words) for row in self.rows), f"{words}")

    def wait_for_no_row(self, word: str) -> None:
        wait_until(lambda: not any(word in row for row in self.rows), f"no {word}")

    def open_dialog(self, word: str) -> None:
        for button in self._browser.find_elements("css selector", "#keys button"):
            if word in str(button.get_attribute("aria-label")):
                button.click()
                return
        raise AssertionError(f"no button for {word}")


@pytest.fixture(scope="module")
def database(redis_server: Any, _databases: Iterator[int]) -> Iterator[str]:
    url = redis_server.url(next(_databases))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture(scope="module")
def start(
    database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ServeProcess]]:
    folder = tmp_path_factory.mktemp("serve")
    environment = {"BROKER_URL": database, "RESULT_URL": database}
    environment[VARIABLE] = str(folder / "journal.jsonl")
    (folder / "token").write_text(f"{TOKEN}\n")
    started = []

    def start(*, with_token: bool = True, **more: str) -> ServeProcess:
        args = ["--token-file", str(folder / "token")] if with_token else []
        process = ServeProcess(POOLS, env=environment | more, args=args).start()
        started.append(process)
        return process.wait_until_ready()

    yield start
    for process in started:
        process.end()
        print(f"--- log of {process.name}\n{process.log}")


@pytest.fixture(scope="module")
def server(start: Callable[..., ServeProcess]) -> ServeProcess:
    return start()


@pytest.fixture
def page(browser: Any, server: ServeProcess) -> Iterator[Page]:
    browser.get("about:blank")
    requested(browser), browser.get_log("browser")  # those of the last test
    page = Page(browser)
    page.open(server.url)
    yield page
    assert page.is_first_load, "everything happened without a reload"
    messages = [line["message"] for line in browser.get_log("browser")]
    expected = ("status of 401", "requires 'TrustedHTML' assignment")
    assert [one for one in messages if not any(words in one for words in expected)] == []
    assert [url for url in requested(browser) if not url.startswith(server.url)] == []


@pytest.fixture(scope="module")
def app(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    env = {"BROKER_URL": database, "RESULT_URL": database}
    env[VARIABLE] = str(tmp_path_factory.mktemp("app") / "journal.jsonl")
    with fresh_module(POOLS, env) as module:
        assert isinstance(module, ModuleType)
        yield module.app


def occupy(app: Any, key: str, *, task: str, task_id: str, ttl: float = 60) -> None:
    """Hold ``key`` until it expires."""
    runtime = Runtime.of(app)
    token = Token(task_id, 0, 0, "n")
    name = runtime.keyspace.lock("page", key)
    since = runtime.clock.wall()
    holder = Holder(task=task, task_id=task_id, worker=task, pid=7, since=since)
    runtime.store.leases.acquire(
        Acquire(slots=(name,), token=token, holder=holder, ttl=ttl), timeout=5
    )


def test_a_holder_appears_and_disappears_without_a_reload(page: Page, app: Any) -> None:
    with hold("appears", scope="page", ttl=60, app=app) as lease:
        page.wait_for_row("page:appears", "running", lease.token.task_id)
    page.wait_for_no_row("page:appears")


def test_a_task_is_found_by_its_id(page: Page, app: Any) -> None:
    for number in (1, 2):
        occupy(app, f"found-{number}", task="page.task", task_id=f"id-found-{number}")
    page.wait_for_row("page:found-1")
    page.type("search", "id-found-2")
    page.wait_for_no_row("page:found-1")
    page.wait_for_row("page:found-2", "page.task", "id-found-2")
    page.type("search", "id-of-no-task")
    wait_until(lambda: "ask below why it ran" in page.text("summary"), "the hint")
    assert page.rows == []


def test_it_says_why_a_task_did_not_run(page: Page, app: Any) -> None:
    page.type("why-id", f"{HOSTILE}unknown")
    page.element("why-ask").click()
    wait_until(lambda: "unknown" in page.text("why-answer").splitlines(), "an answer", 30)
    assert f"Nothing is known of {HOSTILE}unknown" in page.text("why-answer")
    assert page.run("return window.hacked") is None
    task_id = f"skipped-{secrets.token_hex(4)}"
    holder = Holder(task="page.task", task_id="the-holder", worker="w@host")
    value = skipped_value("page.task", "page:k", holder)
    app.backend.store_result(task_id, value, "SUCCESS")
    page.type("why-id", task_id)
    page.element("why-ask").click()
    text = "because page.task[the-holder] on w@host held page:k"
    wait_until(lambda: text in page.text("why-answer"), "the reason", 30)


def test_a_release_needs_the_token_and_a_confirmation(page: Page, app: Any) -> None:
    with hold("stuck", scope="page", ttl=60, app=app) as lease:
        page.wait_for_row("page:stuck")
        page.open_dialog("page:stuck")
        assert lease.key in page.text("dialog-key")
        page.type("user", "ann")
        page.type("reason", "stuck import")
        page.type("token", "not the token of this server")
        page.element("confirm").click()
        wait_until(lambda: "wrong token" in page.text("dialog-error"), "the refusal")
        page.element("cancel").click()
        assert Runtime.of(app).store.leases.inspect(lease.key) is not None
        page.open_dialog("page:stuck")
        page.type("token", TOKEN)
        page.element("confirm").click()
        page.wait_for_no_row("page:stuck")
        Runtime.of(app).locker.heartbeat.ask(lease)
        assert lease.loss is not None
        assert lease.loss.detail.startswith("released by ann on ")


def test_without_a_token_there_is_no_button_and_no_release(
    browser: Any, start: Callable[..., ServeProcess], app: Any
) -> None:
    server, page = start(with_token=False), Page(browser)
    with hold("safe", scope="page", ttl=60, app=app) as lease:
        page.open(server.url)
        page.wait_for_row("page:safe")
        assert page.text("mode") == "Read-only"
        buttons = browser.find_elements("css selector", "#keys button")
        assert buttons
        assert not any(button.is_displayed() for button in buttons)
        body = json.dumps({"key": lease.key, "token": str(lease.token), "user": "eve"})
        script = (
            "const done = arguments[2]; fetch('api/release', {method: 'POST', body: arguments[0],"
            " headers: {'Content-Type': 'application/json', Authorization: `Bearer ${arguments[1]}`"
            "}}).then((answer) => done(answer.status))"
        )
        assert browser.execute_async_script(script, body, TOKEN) == 403
        assert Runtime.of(app).store.leases.inspect(lease.key) is not None


def test_hostile_names_are_shown_as_text(page: Page, app: Any) -> None:
    occupy(app, HOSTILE, task=HOSTILE, task_id=HOSTILE)
    page.type("search", "window.hacked")
    wait_until(lambda: len(page.rows) == 1, "one row")
    [row] = page.rows
    assert row.count(HOSTILE) >= 2
    assert page.run("return document.querySelectorAll('#keys img, #keys script').length") == 0
    assert page.run("return window.hacked") is None
    # Neither can a script of the page make markup from text: a second protection.
    script = "try { document.body.innerHTML = '<b></b>'; return 'made' } catch { return 'refused' }"
    assert page.run(script) == "refused"


def test_what_is_paused_is_listed_as_text_until_somebody_resumes_it(page: Page, app: Any) -> None:
    assert page.text("pauses") == ""
    pause("stopped", scope="page", reason=HOSTILE, app=app)
    wait_until(lambda: "page:stopped is paused since " in page.text("pauses"), "the pause")
    assert HOSTILE in page.text("pauses")
    assert page.run("return document.querySelectorAll('#pauses img, #pauses script').length") == 0
    assert page.element("pauses").is_displayed()
    resume("stopped", scope="page", app=app)
    wait_until(lambda: not page.element("pauses").is_displayed(), "no list")


def test_ten_thousand_keys_stay_usable(page: Page, app: Any, database: str) -> None:
    runtime = Runtime.of(app)
    occupy(app, "of-many", task="page.many", task_id="id-many-template")
    with redis.Redis.from_url(database) as client:
        key = runtime.keyspace.lock("page", "of-many")
        value = client.get(key)
        assert isinstance(value, bytes)
        with client.pipeline(transaction=False) as pipeline:
            for number in range(10_000):
                task_id = f"id-many-{number:05}".encode()
                name = runtime.keyspace.lock("page", f"of-many-{number:05}")
                pipeline.set(name, value.replace(b"id-many-template", task_id), px=600_000)
            pipeline.execute()
    wait_until(lambda: int(page.text("count-held")) >= 10_000, "ten thousand")
    assert len(page.rows) == 200
    assert "The first 200 of " in page.text("summary")
    page.type("search", "id-many-07777")
    page.wait_for_row("page:of-many-07777")
    wait_until(lambda: len(page.rows) == 1, "only that one")
    # It is still live.
    runtime.store.operators.free(runtime.keyspace.lock("page", "of-many-07777"), None, None)
    wait_until(lambda: not page.rows, "none")
    with redis.Redis.from_url(database) as client:
        client.delete(*client.scan_iter("*:of-many*", count=5000))


def test_the_page_shows_findings_and_no_leader(page: Page) -> None:
    wait_until(lambda: "checks are ok" in page.text("sound"), "the doctor's findings")
    assert "persistence" in page.text("findings")
    assert page.text("beat") == "Beat leader: none"


def test_what_a_store_that_is_down_would_say_is_unknown(
    browser: Any, start: Callable[..., ServeProcess]
) -> None:
    server, page = start(LOCK_URL="redis://127.0.0.1:1/0"), Page(browser)
    page.open(server.url)
    wait_until(lambda: "can't be read" in page.text("trouble"), "the trouble")
    counts = [page.text(f"count-{what}") for what in ("all", "held", "waiting", "claimed")]
    assert counts == ["?"] * 4
    assert page.text("beat") == "Beat leader: unknown"
