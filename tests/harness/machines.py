"""Random steps against a model: state machines of hypothesis, the same ones in each run."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

__all__ = ["play"]


def play(machine: Any, examples: int, steps: int, *, shrinks: bool = True) -> None:
    """Run so many examples of so many steps. To shrink a failure costs minutes with a server."""
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if shrinks else [])],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
