"""The examples of docs/migration, run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pages import Page, run

#: The pages with a compatibility class.
PACKAGES = [
    "celery-once",
    pytest.param("celery-singleton", marks=pytest.mark.slow),
    pytest.param("celery-heimdall", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_base_answers_as_its_page_shows(package: str, tmp_path: Path, redis_url: str) -> None:
    Page(f"migration/{package}.md", tmp_path, redis_url).write().check()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_last_deploy_keeps_the_keys_of_the_compatibility_class(
    package: str, tmp_path: Path, redis_url: str
) -> None:
    Page(f"migration/{package}.md", tmp_path, redis_url).write()
    show = "import sys; from {} import report; print(report.name, report.lock_key(42))"
    bridge, done = (run("-c", show.format(name), folder=tmp_path) for name in ("tasks", "done"))
    assert bridge.stdout == done.stdout != ""


def test_the_recipe_compiles_under_a_lease(tmp_path: Path, redis_url: str) -> None:
    Page("migration/index.md", tmp_path, redis_url).write()
    done = run("-c", "import feeds; print(feeds.import_feed.lock_key('u'))", folder=tmp_path)
    assert done.stdout.endswith(":u\n"), done.stderr
