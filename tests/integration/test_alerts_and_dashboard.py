"""The alerts and the dashboard of the package: checked by Prometheus' own tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.instrumentation.prometheus import PrometheusMetrics
from tests.conftest import missing
from tests.harness.processes import ROOT

MONITORING = ROOT / "celery_singleton_lock/serve/monitoring"
ALERTS = MONITORING / "prometheus-alerts.yml"
ALERT_TESTS = ROOT / "tests/integration/prometheus-alerts.test.yml"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
DOCS = "https://celery-singleton-lock.readthedocs.io/en/stable/"
PAGE = (ROOT / "docs/how-to/monitoring.md").read_text()
SURFACE = (ROOT / "tests/public_surface.txt").read_text()


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        missing("promtool is not installed. Debian: apt-get install prometheus")
    return subprocess.run(
        ["promtool", *arguments],
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def names_in(text: str) -> set[str]:
    """The metrics that a text names."""
    found = set(re.findall(r"\bcelery_singleton_[a-z_]+[a-z]\b", text))
    return {re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for name in found}


def documented() -> set[str]:
    """The metrics in the table of docs/how-to/monitoring.md."""
    return {name for line in PAGE.splitlines() if line.startswith("| `") for name in names_in(line)}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_rules_are_valid_and_each_alert_fires_and_is_quiet() -> None:
    for command in (("check", "rules", str(ALERTS)), ("test", "rules", str(ALERT_TESTS))):
        done = promtool(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    fired = set(re.findall(r"alertname: (\w+)\n *exp_alerts:(?! \[\])", ALERT_TESTS.read_text()))
    assert fired == alerts
    assert len(alerts) >= 6


@pytest.mark.parametrize(
    ("option", "path"),
    [("--print-alerts", ALERTS), ("--print-dashboard", MONITORING / "grafana-dashboard.json")],
)
def test_the_command_prints_the_file_without_a_broker_and_a_store(option: str, path: Path) -> None:
    command = [sys.executable, "-m", "celery", "singleton", "serve", option]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == path.read_text()


def test_the_page_lists_each_alert() -> None:
    section = PAGE[PAGE.index("## Alerts") : PAGE.index("## Dashboard")]
    shown = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert shown == re.findall(r"- alert: (\w+)", ALERTS.read_text())


def test_an_alert_that_can_not_fire_is_noticed(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(ALERTS.read_text().replace("store_up == 0", "store_up == 2"))
    tests = tmp_path / "tests.yml"
    tests.write_text(
        ALERT_TESTS.read_text().replace(f"../../{ALERTS.relative_to(ROOT)}", "rules.yml")
    )
    done = promtool("test", "rules", str(tests))
    assert done.returncode == 1
    assert "CeleryLockStoreUnreachable" in done.stdout + done.stderr


def test_each_runbook_link_leads_to_a_heading() -> None:
    links = re.findall(r"runbook_url: (\S+)", ALERTS.read_text())
    assert len(links) == len(re.findall(r"- alert:", ALERTS.read_text()))
    for link in links:
        page, _, anchor = link.removeprefix(DOCS).partition(".html#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, link


def test_the_dashboard_s_queries_are_valid(tmp_path: Path) -> None:
    rules = {
        "groups": [
            {
                "name": "dashboard",
                "rules": [
                    {
                        "record": f"query_{number}",
                        "expr": expression.replace("$__rate_interval", "5m").replace("$task", "t"),
                    }
                    for number, expression in enumerate(expressions())
                ],
            }
        ]
    }
    path = tmp_path / "dashboard.yml"
    path.write_text(json.dumps(rules))  # JSON is YAML
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_of_the_dashboard_s_queries_has_data_if_each_metric_has(tmp_path: Path) -> None:
    """With the names and labels of the metrics; `test_serve` scrapes those of a real worker."""
    series = []
    for kind, name, labels in re.findall(r"^metric: (\w+) (\w+)\((.*)\)$", SURFACE, re.MULTILINE):
        given = ", ".join(f'{label}="running"' for label in labels.split(", ") if label)
        suffix = {"counter": "_total", "histogram": "_bucket"}.get(kind, "")
        ends = [', le="1"', ', le="+Inf"'] if kind == "histogram" else [""]
        series += [f"{name}{suffix}{{{given}{end}}}" for end in ends]
    queries = [each.replace("$__rate_interval", "5m") for each in expressions()]
    queries = [f"count({each.replace('$task', '.*')}) > bool 0" for each in queries]
    expected = [{"labels": "{}", "value": 1}]
    tests = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": "1+1x10"} for one in series],
                "promql_expr_test": [
                    {"expr": each, "eval_time": "9m", "exp_samples": expected} for each in queries
                ],
            }
        ]
    }
    path = tmp_path / "dashboard.yml"
    path.write_text(json.dumps(tests))  # JSON is YAML
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("(celery_singleton_losses", "(celery_lost"))
    assert "celery_lost" in promtool("test", "rules", str(path)).stderr, (
        "the variant that must fail"
    )


def test_the_query_for_leases_without_an_end_counts_neither_held_nor_ended_ones(
    tmp_path: Path,
) -> None:
    [query] = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    counters = {"acquisitions": 9, "releases": 3, "release_failures": 1, "freed": 1}
    series = {f'celery_singleton_{name}_total{{task="t"}}': n for name, n in counters.items()}
    series |= {
        'celery_singleton_losses_total{task="t", reason="gone"}': 1,
        'celery_singleton_losses_total{task="t", reason="expired"}': 0,
        'celery_singleton_keys{task="t", state="running"}': 1,
        'celery_singleton_keys{task="t", state="claim, queued"}': 5,
        'celery_singleton_acquisitions_total{task="idle"}': 2,
        'celery_singleton_releases_total{task="idle"}': 2,
    }
    expected = [{"labels": f'{{task="{task}"}}', "value": n} for task, n in (("t", 2), ("idle", 0))]
    tests = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": f"{n}x5"} for name, n in series.items()
                ],
                "promql_expr_test": [{"expr": query, "eval_time": "3m", "exp_samples": expected}],
            }
        ]
    }
    path = tmp_path / "query.yml"
    path.write_text(json.dumps(tests))  # JSON is YAML
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_no_data_source_of_its_author_and_no_panel_twice() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) >= 12
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {"${datasource}"}


def test_only_documented_metrics_are_used() -> None:
    known = documented()
    for what, text in (("alerts", ALERTS.read_text()), ("dashboard", " ".join(expressions()))):
        assert names_in(text) - {"celery_singleton_"} <= known, what


def test_promtool_has_nothing_to_say_about_the_metrics() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    data = {"outcome": "skip", "reason": "gone", "held": 1.5, "waited": 0.0}
    for name in EventName:
        metrics(Event(name=name, key="k", task="t", data=data))
    text = generate_latest(registry).decode()
    done = promtool("check", "metrics", given=text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
