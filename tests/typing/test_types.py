"""mypy says of `cases.py` what its comments say, with us as an installed, typed package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.acceptance.test_readme import ROOT, block_with

CASES = Path(__file__).with_name("cases.py")

#: One report of mypy: line, kind, message, code.
REPORT = re.compile(r"^[^:]+:(\d+): (error|note): (.*?)(?:  \[([\w-]+)\])?$")

#: Names that reveal_type spells with their modules.
MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=\w)")


#: Options that are wrong, as the API page says to write them for short messages.
CHECKED = """
from celery import Celery
from celery_singleton_lock import LockOptions, SingletonTask, singleton_task

app = Celery("checked")

@singleton_task(app=app, **LockOptions(key="account:{account_id}", on_conflict="skp"))  # refused
def sync(account_id: int) -> str:
    return f"account {account_id}"

@app.task(base=SingletonTask, singleton=LockOptions(key="account:{account_id}", tll=3))  # refused
def load(account_id: int) -> str:
    return f"account {account_id}"
"""


def example(folder: Path, name: str, code: str) -> tuple[str, int]:
    """A file with this code, and its first line to be refused."""
    path = folder / name
    path.write_text(code)
    refused = [n for n, line in enumerate(code.splitlines(), start=1) if "# refused" in line]
    return str(path), refused[0]


def page_example(folder: Path) -> tuple[str, int]:
    """The typed example of docs/reference/api.md."""
    page = (ROOT / "docs/reference/api.md").read_text()
    return example(folder, "typed.py", block_with(page, "# typed.py"))


def expected() -> dict[int, str]:
    marks = {}
    for number, line in enumerate(CASES.read_text().splitlines(), start=1):
        if match := re.search(r"  # ([RE]: .+)$", line):
            marks[number] = match[1]
    return marks


def found(output: str) -> dict[int, str]:
    said: dict[int, str] = {}
    for line in output.splitlines():
        match = REPORT.match(line)
        if match is None:
            continue
        number, kind, message, code = int(match[1]), match[2], match[3], match[4]
        if kind == "error":
            codes = [*filter(None, [said.get(number, "").removeprefix("E: ")]), code]
            said[number] = f"E: {','.join(codes)}"
        elif revealed := re.match(r'Revealed type is "(.*)"', message):
            said[number] = "R: " + MODULE.sub("", revealed[1]).replace("def ", "")
    return said


def wrong_lines(wanted: dict[int, str], got: dict[int, str]) -> list[str]:
    """The cases of which a type checker says something else."""
    lines = CASES.read_text().splitlines()
    return [
        f"{CASES.name}:{number}: {lines[number - 1].strip()}\n    said: {got.get(number)}"
        for number in sorted({*wanted, *got})
        if wanted.get(number) != got.get(number)
    ]


@pytest.mark.slow
def test_mypy_infers_what_the_cases_say(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    config = tmp_path / "mypy.ini"
    # A user's strict configuration, not ours.
    config.write_text("[mypy]\nstrict = True\n")
    page, refused = page_example(tmp_path)
    arguments = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--no-error-summary", "--hide-error-context", str(CASES), page]
    output, errors, _ = api.run(arguments)
    assert errors == ""
    of_page = [line for line in output.splitlines() if "typed.py:" in line]
    assert list(found("\n".join(of_page))) == [refused], of_page
    output = "\n".join(line for line in output.splitlines() if line not in of_page)
    wanted, got = expected(), found(output)
    assert len(wanted) > 30
    wrong = wrong_lines(wanted, got)
    assert not wrong, "\n".join([*wrong, "", output])


@pytest.mark.slow
def test_mypy_names_option_and_value_in_one_line(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    page, first = example(tmp_path, "checked.py", CHECKED)
    arguments = ["--config-file=", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    output, errors, _ = api.run([*arguments, page])
    assert errors == ""
    value, name = output.splitlines()
    assert f":{first}: " in value
    assert "Literal['skp']" in value
    assert 'TypedDict item "on_conflict"' in value
    assert 'Extra key "tll" for TypedDict "LockOptions"' in name


def test_a_wrong_expectation_is_noticed() -> None:
    # The variant that must fail: the comparison itself can fail.
    said = found('cases.py:7: note: Revealed type is "builtins.int"\ncases.py:9: error: no  [misc]')
    assert said == {7: "R: int", 9: "E: misc"}
    assert said != {7: "R: str", 9: "E: misc"}
