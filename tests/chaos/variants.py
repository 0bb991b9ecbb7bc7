"""Locks that are broken on purpose, each with the schedule that exposes it soonest.

A variant proves something only because the same campaign finds nothing when the lock is whole: that
is what `control` makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.chaos.campaign import Campaign
from tests.chaos.drain import PATIENCE
from tests.chaos.publisher import Length
from tests.chaos.site import Plan
from tests.chaos.verdict import Kind

_LONG = (Length(weight=1, steps=4, shortest=0.6, longest=0.9),)
_MIDDLE = (Length(weight=1, steps=4, shortest=0.2, longest=0.5),)
_SHORT = (Length(weight=1, steps=2, shortest=0.01, longest=0.03),)
_FOREIGN = "tests.chaos.foreign"
#: Seconds until a variant counts as not caught, and that a control has to last.
_PATIENCE = 300.0
_CONTROL = 60.0
#: Seconds that a variant whose jobs get lost without a sign has for them at its end.
_LAST_JOBS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
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
        return replace(
            self.campaign,
            plan=plan,
            mix=mix,
            seconds=_CONTROL,
            until=None,
            drains=True,
            patience=PATIENCE,
        )


def _variant(
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
    hosts: int = 0,
    store: str = "redis",
    ttl: float = 0.0,
    drains_after: float = 0.0,
) -> Variant:
    plan = Plan(
        app=app,
        broken=broken,
        compares=compares,
        visibility_timeout=visibility_timeout,
        pool=pool,
        observer=observer,
        beats=beats,
        hosts=hosts,
        store=store,
        ttl=ttl or (1.0 if store == "redis" else 2.0),
        workers=hosts or Plan().workers,
        wall_clocks=hosts > 0,
    )
    campaign = Campaign(
        seconds=drains_after or _PATIENCE,
        seed=1,
        plan=plan,
        faults=faults,
        calm=not faults,
        keys=2,
        waiting=8,
        mix=mix or {"late": 1},
        lengths=lengths,
        until=None if drains_after else caught_by,
        haste=haste,
        drains=bool(drains_after),
        patience=_LAST_JOBS,
    )
    return Variant(name=name, campaign=campaign, caught_by=caught_by)


VARIANTS = (
    # A body that was stopped for longer than its lease frees the key of the one after it. The whole
    # worker is stopped: for a child alone the parent would renew.
    _variant("no-owner-check", Kind.OVERLAP, broken="owner-check", faults=("stop-worker",)),
    # No fault is needed: a body that is longer than the ttl can't ever end.
    _variant("no-renewal", Kind.JOB_LOST, broken="renewal", lengths=_LONG),
    # A worker that is cut off from the store goes on, while another takes the key.
    _variant(
        "no-local-deadline", Kind.OVERLAP, broken="local-deadline", faults=("cut",), lengths=_LONG
    ),
    # A body that is not interrupted, stopped between its check and its write.
    _variant(
        "no-fence-check",
        Kind.STALE_WRITE,
        compares=False,
        faults=("stop-child", "stop-worker"),
        mix={"heedless": 1},
    ),
    # Bodies are longer than the visibility timeout, so each message comes twice.
    _variant("no-nonce", Kind.OVERLAP, broken="nonce", lengths=_LONG, visibility_timeout=1.0),
    # A worker that was stopped for longer than its leases does not report their loss.
    _variant("no-loss-report", Kind.UNREPORTED, broken="loss-report", faults=("stop-worker",)),
    # A call that is delivered again after a kill counts as the newest.
    _variant(
        "no-order",
        Kind.ORDER,
        broken="order",
        faults=("kill-worker", "kill-child"),
        mix={"latest": 1},
        visibility_timeout=3.0,
    ),
    # A message that is delivered again after a kill runs with the first arguments.
    _variant(
        "no-newest-arguments",
        Kind.NEWEST,
        broken="arguments",
        faults=("kill-worker", "kill-child"),
        mix={"newest": 1, "debounced": 1},
        visibility_timeout=3.0,
    ),
    # An observer of one loss takes so long that later leases of its process end too, long after the
    # fault. (In a prefork worker the parent renews for a child whose heartbeat waits.)
    _variant(
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
    # A body that ended while the store was away is not marked as done, and its message comes again.
    # The lease has to outlast the outage: until then no copy runs.
    _variant(
        "no-repetition",
        Kind.RUN_AGAIN,
        broken="repetition",
        faults=("freeze-server", "busy"),
        visibility_timeout=1.0,
        haste=1.0,
        ttl=9.0,
    ),
    # The claim of a message that a worker can't run answers equal calls for ever.
    _variant("no-discards", Kind.DISCARDED, broken="discards", mix={"claimed": 1}),
    _variant(
        "discards-left", Kind.KEY_LEFT, broken="discards", mix={"claimed": 1}, drains_after=8.0
    ),
    # A third body begins beside the two that may run.
    _variant("no-limit", Kind.OVERLAP, broken="limit", mix={"limited": 1}),
    # A hold() runs beside a task of its key.
    _variant(
        "no-tasks-beside-hold",
        Kind.OVERLAP,
        broken="tasks-beside-hold",
        mix={"late": 1, "held": 1, "held_async": 1},
    ),
    # A server that restarts without its data is noticed at the next renewal by the clock.
    _variant(
        "no-haste",
        Kind.REPORTED_LATE,
        broken="haste",
        faults=("restart-empty",),
        mix={"lasting": 1},
        haste=1.0,
    ),
    # A call that arrives without a place runs while the key is free for a moment: between two
    # bodies, and the shorter these are, the more often.
    _variant("no-head-check", Kind.ORDER, broken="head-check", mix={"queued": 1}, lengths=_SHORT),
    # The same where several calls of a key may run: one begins in a slot that is free for a moment.
    _variant(
        "no-turns", Kind.ORDER, broken="head-check", mix={"queued_several": 1}, lengths=_SHORT
    ),
    # A call that takes its place at a worker is dropped, as one that has ended.
    _variant(
        "absent-is-ended", Kind.JOB_LOST, broken="absent", mix={"queued": 1}, drains_after=8.0
    ),
    # A call above its rate begins.
    _variant("no-rate", Kind.RATE, broken="rate", mix={"rated": 1}, lengths=_SHORT),
    # A call of a paused key begins.
    _variant(
        "no-pause",
        Kind.PAUSED,
        broken="pause",
        mix={"queued": 1, "late": 1, "rated": 1},
        faults=("pause-key", "pause-scope"),
        lengths=_SHORT,
    ),
    # The place of such a call is stored, and its message is not.
    _variant("no-message", Kind.JOB_LOST, broken="message", mix={"queued": 1}, drains_after=8.0),
    # A call that died with its process after it was acknowledged is at the head for ever.
    _variant(
        "no-looks",
        Kind.JOB_LOST,
        broken="looks",
        mix={"queued_early": 1},
        faults=("kill-child",),
        drains_after=12.0,
    ),
    # A beat that is cut off from its broker leads on, and the other one waits.
    _variant("no-resignation", Kind.NO_TICK, broken="resignation", faults=("cut-beat",), beats=2),
    # Two of the hosts have one name, and other PIDs once some of their processes were replaced.
    _variant(
        "no-host-identity",
        Kind.OVERLAP,
        broken="host-identity",
        faults=("kill-child",),
        lengths=_LONG,
        hosts=3,
    ),
    # A host is cut off from the store, and its wall clock steps back meanwhile.
    _variant(
        "wall-clock",
        Kind.OVERLAP,
        broken="wall-clock",
        faults=("cut", "host-wrong-clock"),
        lengths=_LONG,
        hosts=3,
    ),
    # Two masters count for themselves until the old one is demoted. That two bodies overlap is not
    # promised there; that fences rise is.
    _variant(
        "sentinel-no-server-clock",
        Kind.FENCE,
        broken="server-clock",
        faults=("leader-moved",),
        store="sentinel",
    ),
    # Nodes that come back empty make up a majority, together with those that were emptied before.
    _variant(
        "redlock-no-quarantine",
        Kind.OVERLAP,
        broken="quarantine",
        faults=("minority-emptied",),
        lengths=_LONG,
        store="redlock",
    ),
    # A host that is cut off goes on, whatever becomes of its lease in etcd, or of its session.
    *(
        _variant(
            f"{store}-no-local-deadline",
            Kind.OVERLAP,
            broken="local-deadline",
            faults=("host-off-store", "host-unplugged"),
            lengths=_LONG,
            hosts=3,
            store=store,
        )
        for store in ("etcd", "zookeeper")
    ),
    _variant("redis-py", Kind.OVERLAP, app=_FOREIGN, mix={"redis_py": 1}, lengths=_LONG),
    _variant(
        "python-redis-lock",
        Kind.OVERLAP,
        app=_FOREIGN,
        mix={"python_redis_lock": 1},
        lengths=_LONG,
        faults=("stop-child", "cut"),  # the parent does not renew for its children
    ),
)
