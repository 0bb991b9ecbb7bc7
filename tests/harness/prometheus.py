"""A real Prometheus, and what its HTTP API answers."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from example_project.private_server import free_port
from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT, Process
from tests.harness.serve import ServeProcess

ALERTS = ROOT / "celery_singleton_lock/serve/monitoring/prometheus-alerts.yml"


def find_prometheus() -> str | None:
    """The path of the program; None: it is not installed."""
    return shutil.which("prometheus")


class Prometheus(Process):
    """A Prometheus on a free port, with the alerts of the package.

    Args:
        server: What it scrapes.
        folder: Where its configuration and its data are.
        interval: Seconds between two scrapes.
    """

    def __init__(self, server: ServeProcess, folder: Path, interval: int = 1) -> None:
        address = server.url.removeprefix("http://").rstrip("/")
        config = {
            "global": {"scrape_interval": f"{interval}s", "evaluation_interval": f"{interval}s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "ours", "static_configs": [{"targets": [address]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._port = free_port()
        options = [f"--web.listen-address=127.0.0.1:{self._port}"]
        options += [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        super().__init__(["prometheus", *options], name="prometheus")

    def wait_until_ready(self) -> Self:
        """Wait until it has scraped."""
        wait_until(lambda: self.values("up") == [1], "Prometheus has scraped")
        return self

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of the API; empty while it is still starting."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except OSError:
            return {}

    def values(self, expression: str) -> list[float]:
        """The values of an expression now."""
        found = self.ask("query", query=expression).get("result", [])
        return [float(one["value"][1]) for one in found]

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        return {one["labels"]["alertname"] for one in self.ask("alerts").get("alerts", [])}
