"""Locks that are broken on purpose, each with the schedule that exposes it soonest.

A twin proves something only because the same campaign finds nothing when the lock is whole: that is
what `control` makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.chaos.campaign import Campaign
from tests.chaos.publisher import Length
from tests.chaos.site import Plan
from tests.chaos.verdict import Kind

_LONG = (Length(weight=1, steps=4, shortest=0.6, longest=0.9),)
_MIDDLE = (Length(weight=1, steps=4, shortest=0.2, longest=0.5),)
_FOREIGN = "tests.chaos.foreign"
#: Seconds until a twin counts as not caught, and that a control has to last.
_PATIENCE = 300.0
_CONTROL = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """One of them.

    Attributes:
        name: For people.
        campaign: What it is put through.
        caught_by: What the checker must find.
    """

    name: str
    campaign: Campaign
    caught_by: Kind

    def control(self) -> Campaign:
        """The same with the lock whole: nothing may be found."""
        plan = replace(self.campaign.plan, app=Plan().app, broken="", compares=True)
        mix = {"late": 1} if self.campaign.plan.app == _FOREIGN else self.campaign.mix
        return replace(self.campaign, plan=plan, mix=mix, seconds=_CONTROL, until=None, drains=True)


def _twin(
    name: str,
    caught_by: Kind,
    *,
    faults: tuple[str, ...] = (),
    mix: dict[str, int] | None = None,
    lengths: tuple[Length, ...] = _MIDDLE,
    app: str = Plan().app,
    broken: str = "",
    compares: bool = True,
    visibility_timeout: float = 30.0,
    pool: str = "prefork",
    observer: float = 0.0,
    haste: float = 4.0,
    beats: int = 0,
) -> Twin:
    plan = Plan(
        app=app,
        ttl=1.0,
        broken=broken,
        compares=compares,
        visibility_timeout=visibility_timeout,
        pool=pool,
        observer=observer,
        beats=beats,
    )
    campaign = Campaign(
        seconds=_PATIENCE,
        seed=1,
        plan=plan,
        faults=faults,
        calm=not faults,
        keys=2,
        waiting=8,
        mix=mix or {"late": 1},
        lengths=lengths,
        until=caught_by,
        haste=haste,
        drains=False,
    )
    return Twin(name=name, campaign=campaign, caught_by=caught_by)


TWINS = (
    # A body that was stopped for longer than its lease frees the key of the one after it. The whole
    # worker is stopped: for a child alone the parent would renew.
    _twin("no-owner-check", Kind.OVERLAP, broken="owner-check", faults=("stop-worker",)),
    # No fault is needed: a body that is longer than the ttl can't ever end.
    _twin("no-renewal", Kind.JOB_LOST, broken="renewal", lengths=_LONG),
    # A worker that is cut off from the store goes on, while another takes the key.
    _twin(
        "no-local-deadline", Kind.OVERLAP, broken="local-deadline", faults=("cut",), lengths=_LONG
    ),
    # A body that is not interrupted, stopped between its check and its write.
    _twin(
        "no-fence-check",
        Kind.STALE_WRITE,
        compares=False,
        faults=("stop-child", "stop-worker"),
        mix={"heedless": 1},
    ),
    # Bodies are longer than the visibility timeout, so each message comes twice.
    _twin("no-nonce", Kind.OVERLAP, broken="nonce", lengths=_LONG, visibility_timeout=1.0),
    # A worker that was stopped for longer than its leases does not report their loss.
    _twin("no-loss-report", Kind.UNREPORTED, broken="loss-report", faults=("stop-worker",)),
    # A call that is delivered again after a kill counts as the newest.
    _twin(
        "no-order",
        Kind.ORDER,
        broken="order",
        faults=("kill-worker", "kill-child"),
        mix={"latest": 1},
        visibility_timeout=3.0,
    ),
    # A message that is delivered again after a kill runs with the first arguments.
    _twin(
        "no-newest-arguments",
        Kind.NEWEST,
        broken="arguments",
        faults=("kill-worker", "kill-child"),
        mix={"newest": 1, "debounced": 1},
        visibility_timeout=3.0,
    ),
    # An observer of one loss takes so long that later leases of its process end too, long after the
    # fault. (In a prefork worker the parent renews for a child whose heartbeat waits.)
    _twin(
        "no-observer-thread",
        Kind.JOB_LOST,
        broken="observer-thread",
        faults=("restart-empty",),
        mix={"plain": 1},
        lengths=_LONG,
        pool="threads",
        observer=9.0,
        haste=0.3,
    ),
    # A server that restarts without its data is noticed at the next renewal by the clock.
    _twin(
        "no-haste",
        Kind.REPORTED_LATE,
        broken="haste",
        faults=("restart-empty",),
        mix={"lasting": 1},
        haste=1.0,
    ),
    # A beat that is cut off from its broker leads on, and the other one waits.
    _twin("no-resignation", Kind.NO_TICK, broken="resignation", faults=("cut-beat",), beats=2),
    _twin("redis-py", Kind.OVERLAP, app=_FOREIGN, mix={"redis_py": 1}, lengths=_LONG),
    _twin(
        "python-redis-lock",
        Kind.OVERLAP,
        app=_FOREIGN,
        mix={"python_redis_lock": 1},
        lengths=_LONG,
        faults=("stop-child", "cut"),  # the parent does not renew for its children
    ),
)
