"""What a release needs: version, addresses, archives, and the workflows that check them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import celery_singleton_lock
from celery_singleton_lock.errors import DOCS
from tests.acceptance.test_package import PACKAGE, run, source_files
from tests.ci.__main__ import ALONE_PARTS, SLOW_PARTS, VERSIONS
from tests.conftest import missing
from tests.harness import matrix
from tests.harness.processes import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CI = (ROOT / ".github/workflows/ci.yml").read_text()
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def texts(source: str) -> Iterator[str]:
    """The strings in a module, without its docstrings."""
    for node in ast.walk(ast.parse(source)):
        parts = [] if isinstance(node, ast.Expr) else ast.iter_child_nodes(node)
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def test_the_changelog_begins_with_this_version_and_its_date_or_with_what_is_not_released() -> None:
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", CHANGELOG, flags=re.MULTILINE)
    if ".dev" in celery_singleton_lock.__version__:
        assert re.findall(r"^## \[(.*?)\]", CHANGELOG, flags=re.MULTILINE)[0] == "Unreleased"
        earlier = [Version(version) for version, _ in released]
        assert all(version < Version(celery_singleton_lock.__version__) for version in earlier)
    else:
        assert released[0][0] == celery_singleton_lock.__version__
    assert all(date.fromisoformat(day) <= date.today() for _, day in released)


def test_every_address_in_a_text_for_users_leads_to_a_page_of_the_documentation() -> None:
    assert PROJECT["urls"]["Documentation"] == DOCS
    found = set()
    for path in (ROOT / PACKAGE).rglob("*.py"):
        source = path.read_text()
        assert not any("docs/" in text for text in texts(source)), f"{path}: pip installs no docs/"
        found |= set(re.findall(r"\{DOCS\}([\w/.#-]+)", source))
    assert found
    for address in found:
        page, _, anchor = address.partition("#")
        text = (ROOT / "docs" / page).with_suffix(".md").read_text()
        assert not anchor or anchor in anchors(text), address


def test_the_addresses_of_the_package_agree() -> None:
    urls = PROJECT["urls"]
    assert urls["Issues"].startswith(urls["Repository"])
    assert urls["Changelog"].startswith(urls["Repository"])
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / ".github/SECURITY.md"]
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        owned = re.findall(r"https://github\.com/[\w-]+/celery-singleton-lock", text)
        assert set(owned) <= {urls["Repository"]}, page
        for path in re.findall(rf"{urls['Repository']}/(?:tree|blob)/main/([\w./-]*\w)", text):
            assert (ROOT / path).exists(), f"{page}: {path}"


@pytest.mark.slow
def test_the_source_archive_builds_the_wheel_and_the_index_takes_both(tmp_path: Path) -> None:
    run("-m", "build", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    [wheel], [archive] = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    run("-m", "twine", "check", "--strict", str(wheel), str(archive), cwd=tmp_path)
    with zipfile.ZipFile(wheel) as built:
        assert {
            name for name in built.namelist() if name.startswith(PACKAGE + "/")
        } == source_files()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"Makefile", "LICENSE", "constraints/dev.txt", ".ci/run"} <= names
    if (ROOT / ".git").exists():
        assert names - {"PKG-INFO"} == source_files(".", untracked=False)


# Workflows.


def actionlint(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("actionlint")
    if not program.exists():
        missing("actionlint is not installed: it is in the dev extra")
    # Without shellcheck, so that all machines say the same.
    command = [str(program), "-shellcheck=", "-pyflakes=", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_workflows_are_valid() -> None:
    done = actionlint(*(f".github/workflows/{name}" for name in WORKFLOWS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_a_workflow_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "ci.yml"
    broken.write_text(CI.replace("matrix.server }}\n        run", "matrix.sever }}\n        run"))
    assert 'property "sever" is not defined' in actionlint(str(broken)).stdout


def test_the_matrix_has_every_version_that_is_supported() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    for python in (each for each in named if "." in each):
        assert f'"{python}"' in CI
    for versions in ("dev", *VERSIONS):
        assert f'versions: "{versions}"' in CI.replace("[", "").replace("]", "")
    for server in (
        r"redis/redis@6\.2",
        r"redis/redis@7\.",
        r"redis/redis@8\.",
        "valkey-io/valkey@",
    ):
        assert re.search(server, CI)
    assert "celery/celery@main" in WORKFLOWS["nightly.yml"]


def test_the_page_shows_the_versions_that_are_tested() -> None:
    assert matrix.PAGE.read_text() == matrix.page_with_tables(), f"run: {matrix.COMMAND}"
    lower = {"5.5", "5.2", "4.2", "2.8", "2.3"}
    oldest = next(row for row in matrix.rows() if row[0].startswith("5.5"))
    assert lower <= {version.rpartition(".")[0] for version in oldest}, "the lower bounds"


def test_the_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"run: make ([\w-]+)", "".join(WORKFLOWS.values()))
    assert {"build", "test", "chaos"} <= set(commands)
    assert all(f"\n{target}:" in makefile for target in commands)
    assert "run: bash .ci/run\n" in CI


def test_the_workflow_takes_every_part_of_the_slow_rest_and_a_release_needs_them() -> None:
    (listed,) = re.findall(r"part: \[(.*)\]", CI)
    numbers = [int(number) for number in listed.split(",")]
    assert numbers == list(range(1, SLOW_PARTS + ALONE_PARTS + len(VERSIONS) + 2))
    assert "needs: [ci, build]" in WORKFLOWS["release.yml"]


def test_a_release_is_published_without_a_stored_token() -> None:
    release = WORKFLOWS["release.yml"]
    assert "id-token: write" in release
    assert "attestations: true" in release
    assert "secrets." not in "".join(WORKFLOWS.values())
