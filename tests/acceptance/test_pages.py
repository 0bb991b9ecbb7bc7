"""The examples of the documentation's pages, run as they are printed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness.pages import Page
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_other_recipes_fail_as_the_page_shows(tmp_path: Path, redis_url: str) -> None:
    Page("explanation/other-recipes.md", tmp_path, redis_url).check()


def test_the_database_refuses_the_older_fence(tmp_path: Path, redis_url: str) -> None:
    Page("tutorials/first-lock.md", tmp_path, redis_url).write()
    Page("explanation/fencing.md", tmp_path, redis_url).write().check()


class Refused(Exception):
    """botocore's ClientError, as far as the page reads it."""

    def __init__(self, code: str) -> None:
        self.response = {"Error": {"Code": code}}


class Bucket:
    """One object with the conditional writes of S3.

    Args:
        between: Called once, between a read and the write that depends on it.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.stored: dict[str, Any] | None = None
        self._between = between

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        found, between = self.stored, self._between
        self._between = lambda: None
        between()
        if found is None:
            raise Refused("404")
        return found

    def put_object(self, Body: bytes, Metadata: dict[str, str], **given: str) -> None:
        found = self.stored
        if "IfNoneMatch" in given and found is not None:
            raise Refused("PreconditionFailed")
        if "IfMatch" in given and (found is None or found["ETag"] != given["IfMatch"]):
            raise Refused("PreconditionFailed")
        etag = f"{Body!r}{Metadata}"
        self.stored = {"Metadata": Metadata, "ETag": etag, "Body": Body}


@pytest.fixture
def objects(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's objects.py."""
    Page("explanation/fencing.md", tmp_path, redis_url).write()
    errors: Any = ModuleType("botocore.exceptions")
    errors.ClientError = Refused
    monkeypatch.setitem(sys.modules, "botocore", ModuleType("botocore"))
    monkeypatch.setitem(sys.modules, "botocore.exceptions", errors)
    module: Any = ModuleType("objects")
    exec((tmp_path / "objects.py").read_text(), vars(module))
    return module


@pytest.mark.parametrize("stored", [False, True])
def test_an_object_keeps_the_newest_fence_whenever_the_older_one_writes(
    objects: Any, stored: bool
) -> None:
    def newer() -> None:
        objects.put_fenced(bucket, "b", "k", b"newer", fence=9)

    bucket = Bucket(between=newer)
    if stored:
        bucket.put_object(b"first", {"fence": "1"})
    with pytest.raises(objects.StaleWrite, match="fence 5 is not the newest"):
        objects.put_fenced(bucket, "b", "k", b"older", fence=5)
    assert bucket.stored is not None
    assert bucket.stored["Body"] == b"newer"
    objects.put_fenced(bucket, "b", "k", b"again", fence=9)
    assert bucket.stored["Body"] == b"again"


@pytest.mark.slow
def test_flask_keeps_its_context_and_shares_the_lock(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/flask.md", tmp_path, redis_url).write()
    worker("shop:celery_app")
    page.check()


def test_every_python_block_of_the_pages_compiles() -> None:
    """A block is a module, or the inside of a function."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.M):
            if ">>>" not in block:
                compile(block, str(page), "exec")
