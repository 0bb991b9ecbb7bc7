"""The examples of README and docs, run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from celery import Celery
from celery.contrib.django.task import DjangoTask
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import PER_TASK, OnConflict, is_skipped, singleton_task
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.errors import DOCS
from tests.harness.log import events_in
from tests.harness.pages import Page, block_with, blocks, run
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker

README = (ROOT / "README.md").read_text()


@pytest.fixture
def example(tmp_path: Path, redis_url: str) -> Path:
    """A folder with the README's tasks.py, on this test's server."""
    code = block_with(README, "# tasks.py")
    ours = re.sub(r"redis://localhost:6379/\d", redis_url, code)
    assert ours != code
    (tmp_path / "tasks.py").write_text(ours)
    return tmp_path


@pytest.fixture
def environment(example: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(example), str(ROOT), os.environ["PYTHONPATH"]])}


@pytest.fixture
def example_worker(worker: Callable[..., CeleryWorker]) -> CeleryWorker:
    return worker("tasks", concurrency=4)


@pytest.mark.usefixtures("example_worker")
def test_the_first_example_prints_what_the_readme_says(example: Path) -> None:
    session = block_with(README, ">>> from tasks import sync")
    (example / "session.txt").write_text(session)
    done = run("-m", "doctest", "session.txt", folder=example)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def catalog(example: Path, redis_url: str, worker: Callable[..., CeleryWorker]) -> str:
    """The session of the page about unique calls; a worker runs its catalog.py."""
    text = (ROOT / "docs/how-to/unique-calls.md").read_text()
    page = re.sub(r"redis://localhost:6379/\d", redis_url, text)
    (example / "catalog.py").write_text(block_with(page, "# catalog.py"))
    worker("catalog", concurrency=4)
    return "\n".join(one for one in blocks(page) if ">>>" in one and "documents import" not in one)


@pytest.mark.slow
def test_the_session_about_uniqueness_goes_as_printed(example: Path, catalog: str) -> None:
    (example / "session.txt").write_text(catalog)
    done = run("-m", "doctest", "-o", "ELLIPSIS", "session.txt", folder=example)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_options_that_a_row_says_to_write_are_accepted() -> None:
    names = {"PER_TASK": PER_TASK, "OnConflict": OnConflict, "dict": dict}
    rows = re.findall(r"^\| .*\|$", (ROOT / "docs/how-to/choosing.md").read_text(), re.MULTILINE)
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    written = [code for code in codes if re.match(r"(\w+)=(?!\.\.\.)", code)]
    assert len(written) >= 15
    app = Celery("rows", broker="memory://", set_as_current=False)
    for number, code in enumerate(written):

        def work(account_id: int, tenant_id: int, document_id: int, name: str) -> None: ...

        options = eval(f"dict({code})", names)
        singleton_task(app=app, name=f"work-{number}", shared=False, **options)(work)
    app.close()


#: What the pages say to write for calls with different arguments.
WISHES = {
    "three": "key=PER_TASK, limit=3",
    "newest": 'key="document:{document_id}", on_conflict="cancel_running"',
    "replaced": 'key="document:{document_id}", unique="until_start", on_duplicate="replace"',
}


#: The tasks of the wishes that are about calls with different arguments.
_WISHES = """
import time
from celery import Celery
from celery_singleton_lock import PER_TASK, singleton_task

app = Celery("wishes", broker={url!r}, backend={url!r})

@singleton_task(app=app, {three})
def three(number):
    began = time.time()
    time.sleep(0.5)
    return began, time.time()

@singleton_task(app=app, {newest})
def newest(document_id, version):
    time.sleep(0 if version == 2 else 60)
    return version

@singleton_task(app=app, {replaced})
def replaced(document_id, text):
    return text
"""


@pytest.mark.parametrize("wish", WISHES)
def test_the_page_about_choosing_says_to_write_so(wish: str) -> None:
    assert f"`{WISHES[wish]}`" in (ROOT / "docs/how-to/choosing.md").read_text()


def test_wishes_about_calls_with_different_arguments_come_true(
    example: Path,
    redis_url: str,
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (example / "wishes.py").write_text(_WISHES.format(url=redis_url, **WISHES))
    monkeypatch.syspath_prepend(str(example))
    tasks = load_app("wishes")
    worker("wishes", concurrency=5)
    results = [tasks.three.delay(number).get for number in range(5)]
    runs = [run for get in results if not is_skipped(run := get(timeout=30))]
    assert len(runs) >= 3
    for began, _ in runs:
        assert sum(start <= began < end for start, end in runs) <= 3
    first, second, third = [tasks.newest.delay("report", version) for version in range(3)]
    assert third.get(timeout=30) == 2
    for older in (first, second):
        with pytest.raises(TaskRevokedError):
            older.get(timeout=30)
    calls = [tasks.replaced.apply_async(("report", text), countdown=1) for text in ("a", "b", "c")]
    assert [call.get(timeout=30) for call in calls] == ["c"] * 3


@pytest.mark.slow
def test_the_session_about_the_last_call_goes_as_printed(
    example: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/unique-calls.md", example, redis_url).write()
    worker("documents", concurrency=4)
    [session] = [one for one in page.sessions if "documents import" in one]
    page.check(session)


@pytest.mark.slow
def test_the_session_about_a_skipped_call_in_a_chain_goes_as_printed(
    example: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    page = re.sub(r"redis://localhost:6379/\d", redis_url, page)
    (example / "chained.py").write_text(block_with(page, "# chained.py"))
    worker("chained")
    (example / "session.txt").write_text(block_with(page, ">>> from chained"))
    done = run("-m", "doctest", "-o", "ELLIPSIS", "session.txt", folder=example)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_session_about_the_newest_call_goes_as_printed(
    example: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = re.sub(
        r"redis://localhost:6379/\d", redis_url, (ROOT / "docs/reference/options.md").read_text()
    )
    (example / "previews.py").write_text(block_with(page, "# previews.py"))
    worker("previews", concurrency=4)
    (example / "session.txt").write_text(block_with(page, ">>> from previews"))
    done = run("-m", "doctest", "-o", "ELLIPSIS", "session.txt", folder=example)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("catalog")
def test_the_schedule_of_the_page_publishes_one_tick_while_it_is_queued_or_running(
    example: Path, redis_url: str
) -> None:
    entry = block_with((ROOT / "docs/how-to/beat.md").read_text(), '{"unique": "until_done"}}')
    entry = entry.replace('"proj.sync"', '"catalog.send_invoice", "args": (7,)')
    assert "args" in entry
    (example / "ticking.py").write_text(
        f"from catalog import app\n{entry.replace('60.0', '0.25')}"
        "app.conf.singleton_lock_beat_poll = 0.1\n"
    )
    command = ["-m", "celery", "-A", "ticking", "beat", "--scheduler", "singleton"]
    with subprocess.Popen(
        [sys.executable, *command, "-l", "INFO"],
        cwd=example,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as beat:
        assert beat.stderr is not None
        lines = []
        try:
            while len(list(events_in(lines, EventName.DUPLICATE, outcome="return_existing"))) < 3:
                lines.append(beat.stderr.readline())
                assert lines[-1], "".join(lines)
        finally:
            beat.terminate()


def test_the_examples_of_users_tests_pass(example: Path) -> None:
    page = (ROOT / "docs/how-to/testing.md").read_text()
    found = [block for block in blocks(page) if "\ndef test_" in block]
    for number, code in enumerate(found):
        (example / f"test_example_{number}.py").write_text(code)
    # Without the other plugins of this environment: they take most of the time of a start.
    ours = ["-p", "celery_singleton_lock.pytest_plugin"]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run("-m", "pytest", "-q", *ours, ".", folder=example, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(found)} passed" in done.stdout


@pytest.fixture
def held(example: Path) -> Iterator[None]:
    """A script that holds account 42, as a task would."""
    script = (
        "import tasks; from celery_singleton_lock import hold\n"
        "with hold('account:42', scope='tasks.sync', app=tasks.app):\n"
        "    print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=example,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("\n", timeout=30)


@pytest.mark.slow
@pytest.mark.usefixtures("held")
def test_the_commands_that_look_at_locks_work_as_printed(example: Path) -> None:
    # The page's `proj` stands for the module of the app, here the README's.
    commands = [
        line.replace("-A proj", "-A tasks").split()[1:]
        for line in blocks((ROOT / "docs/how-to/cli.md").read_text(), "")[0].splitlines()
        if line.startswith("celery -A proj singleton")
    ]
    assert [command[3] for command in commands] == ["ls", "show", "explain", "release", "doctor"]
    outputs = {
        command[3]: run("-m", "celery", *command, folder=example, input="y\n")
        for command in commands
    }
    for name in ("ls", "show", "release"):
        assert "account:42" in outputs[name].stdout, outputs
    assert ": unknown\n" in outputs["explain"].stdout
    assert outputs["doctor"].returncode == 0, outputs["doctor"]
    assert "1 with a lock" in outputs["doctor"].stdout
    assert "released" in outputs["release"].stdout


@pytest.mark.usefixtures("held")
def test_the_session_about_operations_goes_as_printed(example: Path) -> None:
    page = (ROOT / "docs/how-to/cli.md").read_text()
    (example / "session.txt").write_text(block_with(page, ">>> from tasks import app"))
    done = run("-m", "doctest", "session.txt", folder=example)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_worker_that_is_started_as_documented_logs_skips() -> None:
    pages = [ROOT / "README.md", ROOT / "example_project/app.py"]
    pages += [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "example_project/README.md",
    ]
    found = [
        command
        for page in pages
        for command in re.findall(r"celery -A \S+ worker\b[^`\n]*", page.read_text())
    ]
    assert len(found) >= 4
    assert [command for command in found if "-l INFO" not in command] == []


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_links_of_the_readme_work_on_an_index() -> None:
    assert not re.findall(r"\]\((?!https:)[^)]*\)", README), "an index has no relative links"
    found = re.findall(rf"{DOCS}([\w/.-]*)", README)
    assert len(found) > 5
    for path in found:
        page = path.replace("_images", "images").replace(".html", ".md") or "index.md"
        assert (ROOT / "docs" / page).is_file(), path


def test_the_first_screen_has_a_promise_the_install_command_and_a_short_example() -> None:
    screen = README.split("## ")[0]
    for part in ("One run at a time", "distributed lock", "pip install"):
        assert part in screen
    assert len(block_with(README, "# tasks.py").strip().splitlines()) <= 12


def test_the_tasks_for_django_and_beat_have_the_options_that_the_readme_gives_them() -> None:
    app = Celery("readme", broker="memory://", set_as_current=False)
    tasks, views = block_with(README, "# shop/tasks.py").split("# shop/views.py")
    names = {"app": app}
    exec(tasks.replace("@singleton_task(", "@singleton_task(app=app, "), names)
    assert names["charge"].lock_key(7).endswith(":order:7")  # type: ignore[attr-defined]
    assert views.strip() == "charge.delay_on_commit(order.pk)"
    assert callable(DjangoTask.delay_on_commit)
    exec(block_with(README, "def nightly_import"), names)
    assert names["nightly_import"].time_limit == 6 * 3600  # type: ignore[attr-defined]
    app.close()
