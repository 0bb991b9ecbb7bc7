"""``rate``: a call starts only when the rate of its key lets it."""

from __future__ import annotations

from ..core.rate import Rate
from ..core.store_requests import Acquire, rated
from ..run_feature import Feature, Run


class RateFeature(Feature):
    """The rate of a run's key. Retries and redelivered messages count too."""

    def __init__(self, run: Run, rate: Rate) -> None:
        super().__init__(run)
        self._rate = rate

    @classmethod
    def of(cls, run: Run) -> RateFeature | None:
        """The rate of the run's key; None: it has none."""
        rate = run.policy.rate
        return None if rate is None else cls(run, rate)

    def prepare(self, request: Acquire) -> Acquire:
        return rated(request, self._rate)
