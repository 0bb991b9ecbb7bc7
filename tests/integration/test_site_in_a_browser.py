"""The built site: its search answers with the right page, and its pages fit into the window."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT

# The build takes the most of it, on two cores that other tests use.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# In the browser: the sentence under which the results are listed, which says when they all are; the
# results' pages.
_SUMMARY = "const said = document.querySelector('.search-summary')?.textContent ?? '';"
_IS_OVER = "return said.includes('matching') || said.includes('did not match')"
_PAGES = "return [...document.querySelectorAll('#search-results li > a')].map(one => one.pathname)"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from the sources as they are."""
    pytest.importorskip("sphinx", reason="make docs installs Sphinx")
    path = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "html"]
    subprocess.run([*sphinx, str(ROOT / "docs"), str(path)], check=True, stderr=subprocess.DEVNULL)
    return path


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """Its address."""
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def first_page(browser: Any, site: str, question: str) -> str:
    """The page that the search lists first, without its suffix."""
    browser.get(f"{site}/search.html?{urlencode({'q': question})}")
    wait_until(lambda: browser.execute_script(f"{_SUMMARY} {_IS_OVER}"), "the end of the search")
    pages = browser.execute_script(_PAGES)
    return str(pages[0]).removeprefix("/").removesuffix(".html") if pages else ""


# What the fourteen jobs of a new user are called by those who know this library, celery-once, or no
# lock at all.
_QUESTIONS = [
    ("getting started", "tutorials/first-lock"),
    ("how do I lock a task", "tutorials/first-lock"),
    ("OOM-killed: when does it run again?", "how-to/killed"),
    ("OOM killed", "how-to/killed"),
    ("WorkerLostError", "how-to/killed"),
    ("must not be lost", "how-to/killed"),
    ("visibility timeout", "how-to/killed"),
    ("pod OOMKilled", "how-to/killed"),
    ("exit code 137", "how-to/killed"),
    ("worker crashed job lost", "how-to/killed"),
    ("job lost when server restarts", "how-to/killed"),
    ("worker ran out of memory job lost", "how-to/killed"),
    ("OOM", "how-to/killed"),
    ("crash", "how-to/killed"),
    ("does it run again after OOM", "how-to/killed"),
    ("worker died", "how-to/killed"),
    ("segfault", "how-to/killed"),
    ("does celery lose tasks when kubernetes evicts a pod", "how-to/killed"),
    ("kill -9", "how-to/killed"),
    ("reject_on_worker_lost", "how-to/killed"),
    ("task lost", "how-to/killed"),
    ("race condition", "how-to/choosing"),
    ("double click", "how-to/choosing"),
    ("mutex", "how-to/choosing"),
    ("run one at a time", "how-to/choosing"),
    ("only one instance", "how-to/choosing"),
    ("lock timeout", "how-to/choosing"),
    ("one task per user", "how-to/choosing"),
    (
        "how do I make sure that only one task per customer runs at a time?",
        "how-to/choosing",
    ),
    ("overlapping tasks", "how-to/choosing"),
    ("skip if already running", "how-to/choosing"),
    ("wait until the other is finished", "how-to/choosing"),
    ("multiple beats", "how-to/beat"),
    ("several beats send task twice", "how-to/beat"),
    ("three beats", "how-to/beat"),
    ("high availability beat", "how-to/beat"),
    ("beat", "how-to/beat"),
    ("debounce", "how-to/unique-calls"),
    ("many calls in short time run once", "how-to/unique-calls"),
    ("latest wins", "how-to/unique-calls"),
    ("run after the last call", "how-to/unique-calls"),
    ("strict order", "how-to/in-order"),
    ("queue per user", "how-to/in-order"),
    ("per customer queue", "how-to/in-order"),
    ("run in sequence", "how-to/in-order"),
    ("cancel the old task", "reference/options"),
    ("on_conflict", "reference/options"),
    ("wait for the lock", "reference/options"),
    ("semaphore", "reference/options"),
    ("at most three at a time", "reference/options"),
    ("dedupe", "how-to/unique-calls"),
    ("prevent duplicate tasks", "how-to/unique-calls"),
    ("throttle", "how-to/rate"),
    ("already queued", "how-to/unique-calls"),
    ("why did my task not run", "troubleshooting"),
    ("task not executed", "troubleshooting"),
    ("why did X not run", "troubleshooting"),
    ("task is pending forever", "troubleshooting"),
    ("my job disappeared yesterday evening when the server rebooted", "troubleshooting"),
    ("celery -A proj singleton ls", "troubleshooting"),
    ("managed redis", "troubleshooting"),
    ("lock stuck", "troubleshooting"),
    ("skipped", "troubleshooting"),
    ("queue is stuck", "troubleshooting"),
    ("unlock", "how-to/cli"),
    ("delete the lock", "how-to/cli"),
    ("see all locks", "how-to/cli"),
    ("who has the lock", "how-to/cli"),
    ("cancel a waiting call", "how-to/cli"),
    ("grafana", "how-to/monitoring"),
    ("metrics", "how-to/monitoring"),
    ("alerts", "how-to/monitoring"),
    ("celery-once", "migration/celery-once"),
    ("replace celery-once", "migration/celery-once"),
    ("celery-singleton", "migration/celery-singleton"),
    ("AlreadyQueued", "migration/celery-once"),
    ("on_commit", "how-to/django"),
    ("gevent", "how-to/pools"),
    ("eager", "how-to/testing"),
    ("fake redis", "how-to/testing"),
    ("unit test", "how-to/testing"),
    ("how to unit test my task", "how-to/testing"),
    ("unit tests", "how-to/testing"),
    ("unit tests for my task", "how-to/testing"),
    ("Django TestCase", "how-to/testing"),
    ("override_settings", "how-to/testing"),
    ("call lost between commit and publish", "how-to/outbox"),
    ("ACL", "reference/settings"),
    ("redis acl user permissions", "reference/settings"),
    ("editor autocomplete", "reference/api"),
    ("permissions", "reference/settings"),
    ("permission denied", "reference/settings"),
    ("type hints", "reference/api"),
    ("versions", "reference/stability"),
    ("python 3.14", "reference/stability"),
    ("windows", "reference/stability"),
    ("celery 5.4", "reference/stability"),
    ("minimum redis version", "reference/stability"),
    ("what is a lock", "explanation/how-it-works"),
    ("what is a lease", "explanation/how-it-works"),
    ("uninstall", "how-to/switch"),
    ("support policy", "reference/stability"),
    ("rate limit", "how-to/rate"),
    ("RabbitMQ", "how-to/rabbitmq"),
    ("quorum queue", "how-to/rabbitmq"),
    ("SQS", "how-to/sqs"),
    ("MessageGroupId", "how-to/sqs"),
    ("memory", "how-to/capacity"),
    ("performance", "benchmarks"),
    ("is_skipped", "reference/api"),
]


def test_the_search_answers_with_the_right_page_first(browser: Any, site: str) -> None:
    found = [(question, first_page(browser, site, question)) for question, _ in _QUESTIONS]
    assert found == _QUESTIONS


# In the browser: the elements that end beyond the window, the lines of code that scroll left out,
# and the tables and lists of options that must be scrolled to be read.
_TOO_WIDE = """
    const edge = document.documentElement.clientWidth + 1;
    const outside = [...document.querySelectorAll('article, article *')].filter(
        one => one.getBoundingClientRect().right > edge && !one.matches('.table-wrapper *, pre *')
    );
    const scrolled = [...document.querySelectorAll('.table-wrapper, dl.py pre')].filter(
        one => one.scrollWidth > one.clientWidth + 1
    );
    return [...outside, ...scrolled].map(
        one => `${one.tagName} ${one.textContent.trim().slice(0, 60)}`
    )
"""


def set_width(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(
    browser: Any, site: str, folder: Path, width: int
) -> None:
    set_width(browser, width)
    found = {}
    for page in sorted(folder.rglob("*.html")):
        name = str(page.relative_to(folder))
        browser.get(f"{site}/{name}")
        if too_wide := browser.execute_script(_TOO_WIDE):
            found[name] = too_wide[:3]
    assert found == {}


# In the browser: the right edges of the text, the list of its headings, and the window.
_EDGES = """
    const edge = one => document.querySelector(one).getBoundingClientRect().right;
    return [edge('article'), edge('.toc-tree'), document.documentElement.clientWidth]
"""


@pytest.mark.parametrize("width", [1200, 1280, 1440])
def test_the_headings_of_a_page_are_listed_next_to_its_text(
    browser: Any, site: str, width: int
) -> None:
    set_width(browser, width)
    browser.get(f"{site}/reference/options.html")
    text, headings, window = browser.execute_script(_EDGES)
    assert text < headings <= window


# In the browser: scroll to a picture, and tell where its first corner is in the window.
_CORNER = """
    arguments[0].scrollIntoView({block: 'center', behavior: 'instant'});
    const box = arguments[0].getBoundingClientRect();
    return [Math.ceil(box.left) + 1, Math.ceil(box.top) + 1]
"""


@pytest.mark.parametrize(("system", "theme"), [("dark", "auto"), ("light", "dark")])
def test_pictures_are_dark_in_a_dark_window(
    browser: Any, site: str, system: str, theme: str
) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib installs Pillow")
    set_width(browser, 1280)
    media = {"features": [{"name": "prefers-color-scheme", "value": system}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    brightest = {}
    for name in ("benchmarks", "explanation/how-it-works", "how-to/killed"):
        browser.get(f"{site}/{name}.html")
        browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
        for picture in browser.find_elements("css selector", "article img"):
            corner = browser.execute_script(_CORNER, picture)
            window = image.open(BytesIO(browser.get_screenshot_as_png()))
            brightest[picture.get_attribute("src")] = max(window.getpixel(tuple(corner))[:3])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert brightest
    assert max(brightest.values()) < 64, brightest
