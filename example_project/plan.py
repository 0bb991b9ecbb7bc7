"""What the demo sends, and when. Pure: the same seconds give the same plan."""

from collections.abc import Iterator
from dataclasses import dataclass, field

ACCOUNTS = (1, 2, 3)
PAYING_ACCOUNT = 7
CURRENCY = "usd"

#: Seconds between two rounds of imports, and between two rounds of payments. An import takes two
#: seconds.
IMPORT_ROUND, PAYMENT_ROUND = 3.0, 2.5

#: Calls per account and round: the webhook, the customer's click, the impatient second click.
CALLS = 3

#: The burst: so many calls of one task, this many seconds apart, from the start of the run on.
BURST_CALLS, BURST_STEP, BURST_START = 40, 0.075, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    at: float  # seconds after the start of the run
    task: str
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    claim: str = (
        ""  # one of a burst: what it claims until a run starts; the task's key, spelled out
    )


def calls(seconds: float) -> list[Call]:
    """All calls of a run, by time; the last round begins 1.5 s before the end or earlier."""
    plan = [*_imports(seconds), *_payments(seconds), *_burst()]
    return sorted(plan, key=lambda call: call.at)


def _imports(seconds: float) -> Iterator[Call]:
    for start in _rounds(0.3, IMPORT_ROUND, seconds):
        for account in ACCOUNTS:
            for number in range(CALLS):
                at = start + 0.35 * ACCOUNTS.index(account) + 0.25 * number
                # Positional or by keyword: equal arguments are one key, however they are written.
                if number % 2:
                    yield Call(
                        at=at,
                        task="example_project.tasks.import_account",
                        kwargs={"account_id": account},
                    )
                else:
                    yield Call(at=at, task="example_project.tasks.import_account", args=(account,))


def _payments(seconds: float) -> Iterator[Call]:
    for round_number, start in enumerate(_rounds(0.8, PAYMENT_ROUND, seconds)):
        for number in range(CALLS):
            arguments = (PAYING_ACCOUNT, f"payment-{round_number}-{number}", 100)
            yield Call(at=start + 0.05 * number, task="example_project.tasks.pay", args=arguments)


def _burst() -> Iterator[Call]:
    for number in range(BURST_CALLS):
        yield Call(
            at=BURST_START + BURST_STEP * number,
            task="example_project.tasks.refresh_rates",
            args=(CURRENCY,),
            claim=f"currency:{CURRENCY}",
        )


def _rounds(first: float, step: float, seconds: float) -> Iterator[float]:
    at = first
    while at < seconds - 1.5:
        yield at
        at += step
