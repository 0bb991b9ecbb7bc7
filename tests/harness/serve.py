"""A real `celery singleton serve`, and what a client of it reads."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness.processes import ROOT, TIMEOUT, Process


class ServeProcess(Process):
    """``python -m celery -A <app> singleton serve``, on a free port.

    Args:
        app: The module of the app.
        env: As of `Process`.
        args: More arguments.
        cwd: As of `Process`.
    """

    def __init__(
        self,
        app: str,
        *,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = (),
        cwd: Path = ROOT,
    ) -> None:
        command = [sys.executable, "-m", "celery", "-A", app, "singleton", "serve", "--port", "0"]
        super().__init__([*command, *args], env=env, name="serve", cwd=cwd)
        self.url = ""

    def wait_until_ready(self, timeout: float = TIMEOUT) -> Self:
        """Wait until it listens, which is when it prints its address."""
        self.url = self.wait_for_log(r"^(http://\S+/) \(", timeout=timeout)[1]
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        found: dict[str, Any] = json.loads(self.get("api/state")[1])
        return found

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """The metrics, by name (without the prefix of all of them) and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        return {
            (sample.name.removeprefix("celery_singleton_"), frozenset(sample.labels.items())): (
                sample.value
            )
            for family in text_string_to_metric_families(self.get("metrics")[1])
            for sample in family.samples
        }

    def sample(self, name: str, /, **labels: str) -> float:
        """The value of one metric; 0 if it is not there."""
        return self.samples().get((name, frozenset(labels.items())), 0.0)
