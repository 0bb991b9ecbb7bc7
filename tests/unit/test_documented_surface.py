"""What users meet has its row in the reference, and each row is about something that exists.

The lines of tests/public_surface.txt stand for the code: another test compares those two.
`test_events_page` has the events with their signals and levels, `test_package` the public names,
`test_alerts_and_dashboard` the alerts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from celery_singleton_lock.cli.commands import calls_table
from celery_singleton_lock.cli.table import COLUMNS, COUNTS, columns_at
from tests.harness.processes import ROOT
from tests.harness.surface import FILE

DOCS = ROOT / "docs"
SURFACE = FILE.read_text()
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.stem != "changelog"),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def listed(pattern: str) -> list[str]:
    """What the lines of the public surface match."""
    return re.findall(rf"^{pattern}$", SURFACE, re.MULTILINE)


def section(page: str, heading: str) -> str:
    """The text below a heading, until the next of its level or above."""
    text = (DOCS / page).read_text()
    level = heading.partition(" ")[0]
    begin = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{2,{len(level)}}} ", text[begin:], re.MULTILINE)
    return text[begin : begin + end.start()] if end else text[begin:]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of all tables in a text, without their heads."""
    found = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not following.startswith("|---"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_codes(text: str) -> list[str]:
    """What the first cells of the rows show as code."""
    return [code for row in rows(text) for code in codes(row[0])]


def table_with(text: str, cell: str) -> str:
    """The table whose head has this first cell."""
    begin = text.index(f"| {cell} |")
    return text[begin:].partition("\n\n")[0]


# --- options and settings -------------------------------------------------------------------------

OPTIONS = section("reference/options.md", "## Options of one task")
ROWS_OF_OPTIONS = [
    row
    for heading in ("### Start with these", "### Advanced")
    for row in rows(section("reference/options.md", heading))
]


def test_each_option_of_a_task_has_a_row_and_each_row_an_option() -> None:
    options = listed(r"option: (\w+) \(task.*")
    assert sorted(codes(row[0])[0] for row in ROWS_OF_OPTIONS) == sorted(options)


def test_each_value_of_an_option_stands_in_its_row() -> None:
    by_name = {codes(row[0])[0]: " ".join(row) for row in ROWS_OF_OPTIONS}
    by_name["on_conflict"] = " ".join(first_codes(table_with(OPTIONS, "value")))
    values = listed(r"option: (\w+): '(\w+)'")
    assert len(values) > 15
    assert [(name, value) for name, value in values if f'"{value}"' not in by_name[name]] == []


def test_each_row_of_on_conflict_is_a_value_of_it() -> None:
    shown = [value.strip('"') for value in first_codes(table_with(OPTIONS, "value"))]
    assert sorted(shown) == sorted(listed(r"option: on_conflict: '(\w+)'"))


def settings_of(cell: str) -> Iterator[str]:
    """The settings that a cell names; ``_suffix`` stands for one with the beginning of all."""
    for name in codes(cell):
        yield name if name.startswith("singleton_lock_") else f"singleton_lock{name}"


def test_each_setting_has_a_row_and_each_row_a_setting() -> None:
    tables = rows(section("reference/settings.md", "## Settings of the app"))
    shown = [name for row in tables for name in settings_of(row[0])]
    assert sorted(shown) == sorted(listed(r"setting: (singleton_lock_\w+)(?: = .*)?"))


def test_no_page_names_a_setting_that_does_not_exist() -> None:
    known = set(listed(r"setting: (singleton_lock_\w+)(?: = .*)?"))
    known |= {"singleton_lock_expiry"}  # celery-singleton's
    for page in PAGES:
        named = set(re.findall(r"\bsingleton_lock_[a-z_]+[a-z]\b", page.read_text()))
        assert named <= known, page


# --- metrics and events ---------------------------------------------------------------------------


def test_each_metric_has_a_row_with_its_type_and_labels_and_each_row_a_metric() -> None:
    expected = {
        (f"{name}_total" if kind == "counter" else name, kind, labels)
        for kind, name, labels in listed(r"metric: (\w+) (\w+)\((.*)\)")
    }
    shown = {
        (codes(name)[0], kind, ", ".join(codes(labels)))
        for name, kind, labels, *_ in rows(section("how-to/monitoring.md", "## Metrics"))
    }
    assert shown == expected


def test_each_field_of_an_event_has_a_row_and_each_row_a_field() -> None:
    shown, event = [], ""
    for row in rows(section("reference/events.md", "## Data")):
        event = codes(row[0])[0] if row[0] else event
        shown += [(event, field) for field in codes(row[1])]
    assert sorted(shown) == sorted(listed(r"event: ([\w-]+): field (\w+)"))


def test_the_fields_that_all_events_have_are_on_the_page() -> None:
    page = (DOCS / "reference/events.md").read_text()
    for field in [
        *listed(r"log field: (\w+)"),
        *listed(r"worker event: singleton-\*: field (\w+)"),
    ]:
        assert f"`{field}`" in page or field == "timestamp", field  # Celery's own


# --- commands -------------------------------------------------------------------------------------

#: The page where each command is described.
COMMAND_PAGES = dict.fromkeys(
    ("ls", "show", "explain", "release", "watch", "queue", "cancel", "pause", "paused", "resume"),
    "cli.md",
)
COMMAND_PAGES |= {"serve": "monitoring.md", "doctor": "../reference/doctor.md"}
#: Of these the page says that they take the options of another command.
SAME_OPTIONS = {"watch": "ls"}


def test_each_command_and_each_of_its_options_is_described() -> None:
    assert set(listed(r"command: singleton (\w+)")) == set(COMMAND_PAGES)
    for command, option in listed(r"command: singleton (\w+): (--[\w-]+)"):
        text = (DOCS / "how-to" / COMMAND_PAGES[command]).read_text()
        assert option in text, f"{command} {option}"
    for command, other in SAME_OPTIONS.items():
        assert (
            f"`{command}` with the options of `{other}`"
            in (DOCS / "how-to" / COMMAND_PAGES[command]).read_text()
        )


def test_each_command_of_an_operator_has_a_row_and_each_row_a_command() -> None:
    shown = set()
    table = table_with(section("how-to/cli.md", "## Commands"), "command")
    for code in first_codes(table):
        command, *words = code.split()
        shown.add(command)
        options = {(command, word) for word in words if word.startswith("--")}
        assert options <= set(listed(r"command: singleton (\w+): (--[\w-]+)")), code
    assert shown == {name for name, page in COMMAND_PAGES.items() if page == "cli.md"}


def test_each_column_of_the_tables_of_an_operator_has_a_row_and_each_row_a_column() -> None:
    page = (DOCS / "how-to/cli.md").read_text()
    columns = {*COLUMNS, *COUNTS, *columns_at(datetime.now(UTC)), *calls_table([]).split()}
    assert set(first_codes(table_with(page, "column"))) == columns


def test_each_option_of_serve_has_a_row_and_each_row_an_option() -> None:
    table = table_with((DOCS / "how-to/monitoring.md").read_text(), "option")
    shown = {code.split()[0] for code in first_codes(table)}
    assert shown == set(listed(r"command: singleton serve: (--[\w-]+)"))


def test_no_page_shows_a_command_or_an_option_that_does_not_exist() -> None:
    commands = set(listed(r"command: singleton (\w+)"))
    options = set(listed(r"command: singleton (\w+): (--[\w-]+)")) | {
        (c, "--help") for c in commands
    }
    shown = 0
    for page in PAGES:
        # A line of a shell may go on in the next one.
        text = page.read_text().replace("\\\n", " ")
        for command, rest in re.findall(r"celery (?:-A|--app) \S+ singleton (\w+)([^`\n|]*)", text):
            assert command in commands, f"{page}: {command}"
            for option in re.findall(r"(?<!\S)--[\w-]+", rest):
                assert (command, option) in options, f"{page}: {command} {option}"
            shown += 1
    assert shown > 40


# --- doctor and extras ----------------------------------------------------------------------------


def findings() -> set[tuple[str, str]]:
    """Severity and subject of each finding of the doctor; faults have no severity of their own."""
    package = ROOT / "celery_singleton_lock"
    found = set()
    for path in [*(package / "doctor").glob("*.py"), package / "stores/remedies.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                is_finding = node.func.id in ("error", "warning", "note", "ok", "Fault", "_Fault")
                if is_finding and node.args and isinstance(node.args[0], ast.Constant):
                    found.add((node.func.id, str(node.args[0].value)))
    return found


def test_each_subject_of_the_doctor_has_a_row_and_each_row_a_subject() -> None:
    shown, subject = set(), ""
    for first, severity, _ in rows((DOCS / "reference/doctor.md").read_text()):
        subject = codes(first)[0] if first else subject
        shown.add((severity, subject))
    assert {subject for _, subject in shown} == {subject for _, subject in findings()}
    severe = {one for one in findings() if one[0] in ("error", "warning", "note")}
    assert severe - shown == set()


@pytest.mark.parametrize("extra", listed(r"entry point: extra: (\w+)"))
def test_each_extra_is_shown_where_it_is_needed(extra: str) -> None:
    command = re.compile(rf"celery-singleton-lock\[(?:\w+,)*{extra}[\],]")
    assert any(command.search(page.read_text()) for page in PAGES)


#: What people call it elsewhere. The search of the site shows main entries (`!`) first.
SEARCHED = {
    "how-to/killed.md": ("OOM", "out of memory", "crash"),
    "how-to/choosing.md": ("mutex",),
    "reference/options.md": ("semaphore",),
    "how-to/in-order.md": ("queue per user", "FIFO"),
    "how-to/unique-calls.md": ("dedupe", "throttle", "coalesce"),
    "troubleshooting.md": ("stuck lock", "deadlock"),
    "how-to/beat.md": ("leader election",),
}


@pytest.mark.parametrize("page", SEARCHED)
def test_the_index_has_the_words_that_people_search_for(page: str) -> None:
    entries = re.findall(r"^:::\{index\} !(.*)$", (DOCS / page).read_text(), re.MULTILINE)
    assert set(SEARCHED[page]) <= {word.strip() for entry in entries for word in entry.split(", !")}


def test_acks_late_is_recommended_with_reject_on_worker_lost_only() -> None:
    """Alone it loses the job whose pool process is killed."""
    sources = [
        path for name in ("examples", "example_project") for path in (ROOT / name).rglob("*.py")
    ]
    shown = 0
    for path in [*PAGES, *sources]:
        for paragraph in re.split(r"\n\s*\n|\n(?=[|*] )", path.read_text()):
            if "acks_late=True" in paragraph:
                assert "reject_on_worker_lost=True" in paragraph, f"{path}: {paragraph}"
                shown += 1
    assert shown > 15


#: Options about calls of one key: alone, they do nothing for calls with different arguments.
ABOUT_A_KEY = re.compile(r'\blimit=|"(?:cancel_running|queue|replace)"|\bdebounce=')


@pytest.mark.parametrize("page", ["docs/how-to/choosing.md"])
def test_what_to_write_for_calls_of_one_key_names_the_key(page: str) -> None:
    shown = [row for row in rows((ROOT / page).read_text()) if ABOUT_A_KEY.search(row[1])]
    assert len(shown) >= 5
    assert [row for row in shown if "key=" not in row[1]] == []


def test_rows_are_found_in_their_table_only() -> None:
    tables = (
        "| option | x |\n|---|---|\n| `a`, `b` | `c` |\n\n| other | x |\n|---|---|\n| `d` | |\n"
    )
    assert first_codes(table_with(tables, "option")) == ["a", "b"]
    assert rows(tables) == [["`a`, `b`", "`c`"], ["`d`", ""]]
