"""What is claimed of the protocol, and what each protection is there for: one row per search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.model.spin import Search

__all__ = ["CHECKS", "Check"]

_LEASE = Path(__file__).with_name("lease.pml")
_WAIT_QUEUE = Path(__file__).with_name("wait_queue.pml")
_DELIVERY = Path(__file__).with_name("delivery.pml")
_QUEUE = Path(__file__).with_name("queue.pml")
_QUEUE_LIMIT = Path(__file__).with_name("queue_limit.pml")


@dataclass(frozen=True, slots=True)
class Check:
    """One search, and what it has to find.

    Attributes:
        claim: In words; of a refuted one, what is taken out.
        model: The file.
        definitions: The definitions of its preprocessor.
        violated: A part of the statement that has to be violated; empty: nothing may be.
        search: How.
    """

    claim: str
    model: Path
    definitions: tuple[str, ...]
    violated: str = ""
    search: Search = Search.ALL

    @property
    def holds(self) -> bool:
        """Whether nothing may be found."""
        return not self.violated


_ASYNC = ("TTL=2", "ASYNC", "NO_STRAYS")
# Where nothing expires, an asynchronous release that was lost has to be resent.
_WITHOUT_TTL = (*_ASYNC, "SURE", "NO_EXPIRY", "LIVENESS")

# Parts of the statements in the models.
_EXCLUSION = "latest"
_UNTOUCHED = "key==c[0].token"
_OVERSTAYED = "overstayed<"
_NOTED = "owed_token!=key"
_ORDER = ">=newest"
_EXCLUDED = "key==(0+1)"
_WOKEN_ONLY = "woken==(me+1)"
_WOKEN_ONCE = "!(listed)"
_RESERVED_BRIEFLY = "stays<"
_ONE_BODY = "trusts&&"
_DONE_ONCE = "over["
_RESERVED = "between=="
_KEPT = "done["
_FOREVER = "acceptance cycle"
_IN_ORDER = "began[1]"
# The same of the queue of a key, with the numbers of its guarantees.
_ALONE = "at==2)&&"  # 1
_AFTER = "called_after["  # 2
_NOT_LOST = "returned["  # 3
_BEGUN_ONCE = "!(once["  # 4
_DUE = "||due"  # 6
_DISCARDED = "(marker["  # 7
_NEWEST = ">=begun["  # 8
_RAISED = "!(raised["  # 9
_RESULT = "||result["  # 13
_NOT_PAUSED = "!(paused"  # 15
_IN_TIME = "!(spent"  # 16
_OWED = "noted[me]!="
_NEVER_BOTH = "ended[0]&&ended[1]"
# The same of a queue of which two calls run at a time.
_TWO_BODIES = "(foreign==1))<=2"  # 1
_FIRST_BEGUN = "begun[0])||ended[0]"  # 2
_NOT_BEGUN = "!(begun[w[me].c])"  # 4
_ONE_HINT = "!(begun[2])))<=1"  # 17
_IN_FRONT = "(state[1]!=0)))<2"  # 18
_NEVER_ALL = "&&together)&&"

_CANCELS = ("FAULTS=1", "CANCELS")


def _refuted(claim: str, model: Path, violated: str, *definitions: str) -> Check:
    search = Search.FAIR if violated == _FOREVER else Search.SHORTEST
    return Check(claim, model, definitions, violated, search)


CHECKS = (
    Check("exclusion: two clients, strays", _LEASE, ("TTL=3",)),
    Check("exclusion: three clients", _LEASE, ("TTL=2", "N=3", "NO_STRAYS")),
    Check("exclusion: two clients and their parents", _LEASE, ("TTL=2", "PARENT_HEARTBEAT")),
    Check("exclusion again, a ttl after a loss", _LEASE, ("TTL=2", "LOSSES=1")),
    Check(
        "order at the resource, over a loss",
        _LEASE,
        ("TTL=2", "FENCES", "LOSSES=1", "NO_STRAYS", "HORIZON=4", "GRANTS=3"),
    ),
    Check("no lock is stuck", _LEASE, ("TTL=2", "LIVENESS"), search=Search.FAIR),
    Check("async releases: strays", _LEASE, ("TTL=2", "ASYNC", "ONE_SIDED")),
    Check("async releases: free within a ttl", _LEASE, (*_ASYNC, "OVERSTAYS")),
    Check("async releases: the parents renew", _LEASE, (*_ASYNC, "PARENT_HEARTBEAT", "ONE_SIDED")),
    Check("async releases, again a ttl after a loss", _LEASE, (*_ASYNC, "LOSSES=1", "ONE_SIDED")),
    Check(
        "async releases: no lock is stuck",
        _LEASE,
        (*_ASYNC, "LIVENESS", "ONE_SIDED"),
        search=Search.FAIR,
    ),
    Check("async releases: free without a ttl", _LEASE, _WITHOUT_TTL, search=Search.FAIR),
    Check("waiting: which client is woken, over a loss", _WAIT_QUEUE, ("FORGETS",)),
    Check("waiting: no client waits for ever", _WAIT_QUEUE, ("LIVENESS",), search=Search.FAIR),
    Check("deliveries, conflicts wait: 1 fault", _DELIVERY, ("FAULTS=1",)),
    Check("deliveries, conflicts skip: 2 faults", _DELIVERY, ("FAULTS=2", "SKIPS")),
    Check("newest call: 2 faults", _DELIVERY, ("FAULTS=2", "CANCELS")),
    Check(
        "newest call: every job ends",
        _DELIVERY,
        ("FAULTS=1", "CANCELS", "LIVENESS"),
        search=Search.FAIR,
    ),
    Check("every job is done", _DELIVERY, ("FAULTS=1", "SKIPS", "LIVENESS"), search=Search.FAIR),
    Check("queue, early: 1 fault", _QUEUE, ("FAULTS=1",)),
    Check("queue, late: 1 fault", _QUEUE, ("FAULTS=1", "LATE")),
    Check("queue, late: an attempt begins once, 1 fault", _QUEUE, ("FAULTS=1", "LATE", "BOUNDED")),
    Check("queue, early: joins at a worker, 1 fault", _QUEUE, ("FAULTS=1", "DIRECT")),
    Check("queue, late: joins at a worker, 1 fault", _QUEUE, ("FAULTS=1", "DIRECT", "LATE")),
    Check("queue, early: a call is taken out", _QUEUE, ("FAULTS=0", "OPERATOR")),
    Check("queue, late: the same, 1 fault", _QUEUE, ("FAULTS=1", "OPERATOR", "DIRECT", "LATE")),
    Check("queue, early: paused, 1 fault", _QUEUE, ("FAULTS=1", "PAUSE")),
    Check(
        "queue, late: the same, joins at a worker", _QUEUE, ("FAULTS=1", "PAUSE", "DIRECT", "LATE")
    ),
    Check("queue, early: a rate, 1 fault", _QUEUE, ("FAULTS=1", "RATE")),
    Check("queue, late: a rate, 1 fault", _QUEUE, ("FAULTS=1", "RATE", "LATE")),
    Check("queue, early: a rate, joins at a worker", _QUEUE, ("FAULTS=1", "RATE", "DIRECT")),
    Check("queue, early: a loss", _QUEUE, ("FAULTS=0", "LOSS")),
    Check("queue, late: a loss", _QUEUE, ("FAULTS=0", "LOSS", "LATE")),
    *(
        Check(f"queue, {claim}", _QUEUE, definitions, search=Search.FAIR)
        for claim, definitions in (
            ("early: every call ends, 1 fault", ("FAULTS=1", "LIVENESS")),
            ("late: every call ends, 1 fault", ("FAULTS=1", "LIVENESS", "LATE")),
            ("late: begins once, and ends", ("FAULTS=1", "LIVENESS", "LATE", "BOUNDED")),
            ("early: ends when one is taken out", ("FAULTS=0", "LIVENESS", "OPERATOR")),
            ("early: every call ends after a pause", ("FAULTS=0", "LIVENESS", "PAUSE")),
            (
                "late: the same, joins at a worker",
                ("FAULTS=0", "LIVENESS", "PAUSE", "DIRECT", "LATE"),
            ),
            ("early: every call ends with a rate", ("FAULTS=0", "LIVENESS", "RATE")),
            ("early: the same, 1 fault", ("FAULTS=1", "LIVENESS", "RATE", "DIRECT")),
            ("late: ends with a rate, 1 fault", ("FAULTS=1", "LIVENESS", "RATE", "DIRECT", "LATE")),
            ("early: its head is hinted", ("FAULTS=1", "HINTS")),
            ("early: a foreign release is noticed", ("FAULTS=0", "UNNOTICED")),
        )
    ),
    Check("two at a time, early: 2 faults", _QUEUE_LIMIT, ("FAULTS=2",)),
    Check("two at a time, late: 2 faults", _QUEUE_LIMIT, ("FAULTS=2", "LATE")),
    Check("two at a time, early: joins at a worker", _QUEUE_LIMIT, ("FAULTS=1", "DIRECT")),
    Check("two at a time, late: joins at a worker", _QUEUE_LIMIT, ("FAULTS=1", "DIRECT", "LATE")),
    *(
        Check(f"two at a time, {claim}", _QUEUE_LIMIT, definitions, search=Search.FAIR)
        for claim, definitions in (
            ("early: every call ends", ("FAULTS=1", "LIVENESS")),
            ("late: every call ends", ("FAULTS=1", "LIVENESS", "LATE")),
            ("late: the same, joins there", ("FAULTS=0", "LIVENESS", "DIRECT", "LATE")),
            ("early: the next is hinted", ("FAULTS=1", "HINTS", "ENDLESS")),
            ("late: the next is hinted", ("FAULTS=1", "HINTS", "ENDLESS", "LATE")),
        )
    ),
    _refuted("release without owner check", _LEASE, _EXCLUSION, "NO_OWNER_CHECK"),
    _refuted("no local deadline", _LEASE, _EXCLUSION, "NO_DEADLINE"),
    _refuted("no margin for the clocks", _LEASE, _EXCLUSION, "NO_MARGIN"),
    _refuted("trust from the reply's time", _LEASE, _EXCLUSION, "TRUST_FROM_REPLY"),
    _refuted(
        "a renewal makes a lost key again",
        _LEASE,
        _EXCLUSION,
        "RENEWAL_RECREATES",
        "LOSSES=1",
        "TTL=3",
    ),
    _refuted(
        "no fence check at the resource",
        _LEASE,
        _ORDER,
        *("FENCES", "NO_FENCE_CHECK", "TTL=2", "NO_STRAYS", "HORIZON=4", "GRANTS=3"),
    ),
    _refuted(
        "fences that only count",
        _LEASE,
        _ORDER,
        *("FENCES", "FENCE_WITHOUT_CLOCK", "LOSSES=1", "TTL=2", "NO_STRAYS", "HORIZON=4"),
        "GRANTS=3",
    ),
    _refuted("keys that don't expire", _LEASE, _FOREVER, "NO_EXPIRY", "LIVENESS", "TTL=2"),
    _refuted(
        "resent without owner check",
        _LEASE,
        _UNTOUCHED,
        "AGAIN_WITHOUT_OWNER",
        *_ASYNC,
    ),
    _refuted(
        "a released token is acquired with again",
        _LEASE,
        _UNTOUCHED,
        "TOKEN_AGAIN",
        *_ASYNC,
    ),
    _refuted(
        "what was released is renewed",
        _LEASE,
        _OVERSTAYED,
        *("HEARTBEAT_GOES_ON", "OVERSTAYS", *_ASYNC),
    ),
    _refuted(
        "a dead child's async release is forgotten",
        _LEASE,
        _NOTED,
        "NOTE_FORGOTTEN",
        *_ASYNC,
    ),
    _refuted("a lost release stays lost", _LEASE, _FOREVER, "LOST_FOR_GOOD", *_WITHOUT_TTL),
    _refuted("drained before it is sent", _LEASE, _FOREVER, "DRAIN_BEFORE_SEND", *_WITHOUT_TTL),
    _refuted("a handoff token takes any key", _WAIT_QUEUE, _EXCLUDED, "HANDOFF_TAKES_ALL"),
    _refuted("handoff tokens without a name", _WAIT_QUEUE, _WOKEN_ONLY, "HANDOFF_WITHOUT_NAME"),
    _refuted("a reserved key is any client's", _WAIT_QUEUE, _WOKEN_ONLY, "RESERVED_FOR_ANY"),
    _refuted("resent, and handed over again", _WAIT_QUEUE, _WOKEN_ONCE, "AGAIN_HANDS_OVER"),
    _refuted("reserved until a client comes", _WAIT_QUEUE, _RESERVED_BRIEFLY, "RESERVED_FOR_EVER"),
    _refuted("only wake-ups, no polling", _WAIT_QUEUE, _FOREVER, "NO_POLLING", "LIVENESS"),
    _refuted("no nonce", _DELIVERY, _ONE_BODY, "NO_NONCE", "FAULTS=1"),
    _refuted("no ordinal", _DELIVERY, _ONE_BODY, "NO_ORDINAL", "FAULTS=1"),
    _refuted("no done marker", _DELIVERY, _DONE_ONCE, "NO_MARKER", "FAULTS=1"),
    _refuted("no reservation for a retry", _DELIVERY, _RESERVED, "NO_RESERVATION", "FAULTS=1"),
    _refuted("requeued after giving up", _DELIVERY, _KEPT, "ACK_FIRST", "FAULTS=1"),
    _refuted(
        "requeued after giving up, in the end",
        _DELIVERY,
        _FOREVER,
        "ACK_FIRST",
        "LIVENESS",
        "FAULTS=1",
    ),
    _refuted("started work is skipped", _DELIVERY, _KEPT, "SKIP_STARTED", "SKIPS", "FAULTS=1"),
    _refuted(
        "the duplicate has the only copy", _DELIVERY, _KEPT, "DUPLICATE_TAKES_ALL", "FAULTS=2"
    ),
    _refuted(
        "freed before the child is dead",
        _DELIVERY,
        _ONE_BODY,
        "RELEASE_ON_ANNOUNCEMENT",
        "FAULTS=1",
    ),
    _refuted("a newer call does not wait", _DELIVERY, _ONE_BODY, *_CANCELS, "TAKES_OVER"),
    _refuted("only a refused call is noted", _DELIVERY, _IN_ORDER, *_CANCELS, "NOTED_IF_REFUSED"),
    *(
        _refuted(f"queue: {claim}", _QUEUE, violated, *definitions)
        for claim, violated, definitions in (
            ("its head is not stored", _NOT_LOST, ("HEAD_NOT_STORED", "FAULTS=1")),
            ("a late head is passed over", _AFTER, ("PASSED_OVER", "FAULTS=1")),
            ("attempt 0 is published again", _NEWEST, ("ATTEMPT_0", "FAULTS=1", "LATE")),
            ("begun is not looked at", _BEGUN_ONCE, ("BEGUN_UNCHECKED", "FAULTS=1")),
            (
                "begins are not counted",
                _BEGUN_ONCE,
                ("BEGUN_UNCHECKED", "FAULTS=1", "LATE", "BOUNDED"),
            ),
            ("the note is erased too early", _OWED, ("NOTE_ERASED_EARLY", "FAULTS=1")),
            (
                "a pause is checked at hints only",
                _NOT_PAUSED,
                ("PAUSE_AT_HINT", "FAULTS=0", "PAUSE"),
            ),
            (
                "a paused call is dropped",
                _DISCARDED,
                ("PAUSED_DROPPED", "FAULTS=0", "PAUSE", "DIRECT"),
            ),
            ("a paused queue is not due", _DUE, ("SWEPT_ONCE", "FAULTS=0", "PAUSE")),
            ("a rate is checked at hints only", _IN_TIME, ("RATE_AT_HINT", "FAULTS=0", "RATE")),
            ("a begin does not count", _IN_TIME, ("RATE_NOT_TAKEN", "FAULTS=0", "RATE")),
            (
                "a call that is too early is dropped",
                _DISCARDED,
                ("RATED_DROPPED", "FAULTS=0", "RATE", "DIRECT"),
            ),
            ("a call that is too early is not due", _DUE, ("RATE_NOT_DUE", "FAULTS=0", "RATE")),
            ("absent is taken for ended", _DISCARDED, ("ABSENT_IS_ENDED", "FAULTS=0", "DIRECT")),
            ("no head check", _AFTER, ("NO_HEAD_CHECK", "FAULTS=1", "DIRECT", "LATE")),
            ("no look: a head stays unhinted", _FOREVER, ("NO_SWEEP", "FAULTS=0", "HINTS")),
            ("no look: a foreign release", _FOREVER, ("NO_SWEEP", "FAULTS=0", "UNNOTICED")),
            ("the next is the last plus one", _FOREVER, ("LAST_PLUS_ONE", "FAULTS=1", "LIVENESS")),
            ("join in two steps", _DUE, ("JOIN_IN_TWO", "FAULTS=1")),
            ("an end without its token", _ALONE, ("END_WITHOUT_TOKEN", "FAULTS=1", "LATE")),
            ("withdrawn without a marker", _RAISED, ("WITHDRAW_WITHOUT_MARKER", "FAULTS=1")),
            ("a retry does not join again", _DUE, ("RETRY_OVERWRITES", "FAULTS=0", "LOSS")),
            ("taken out before its result", _RESULT, ("RESULT_LAST", "FAULTS=0", "OPERATOR")),
            ("never both end with a fault", _NEVER_BOTH, ("WITNESS", "FAULTS=1")),
        )
    ),
    *(
        _refuted(f"two at a time: {claim}", _QUEUE_LIMIT, violated, *definitions)
        for claim, violated, definitions in (
            ("no turn", _FIRST_BEGUN, ("NO_TURN", "FAULTS=1", "DIRECT", "LATE")),
            ("no front", _IN_FRONT, ("NO_FRONT", "FAULTS=1", "LATE")),
            ("slots are not counted", _TWO_BODIES, ("SLOTS_UNCHECKED", "FAULTS=0")),
            ("begun is not looked at", _NOT_BEGUN, ("BEGUN_UNCHECKED", "FAULTS=1")),
            ("a later join is hinted", _ONE_HINT, ("BEHIND_IS_HINTED", "FAULTS=0")),
            ("a join does not make it due", _DUE, ("JOIN_UNPLANNED", "FAULTS=0")),
            (
                "a grant hints no call",
                _FOREVER,
                ("NO_HINT_AT_GRANT", "FAULTS=0", "HINTS", "ENDLESS"),
            ),
            (
                "only releases hint",
                _FOREVER,
                ("HINT_AT_RELEASE_ONLY", "FAULTS=1", "LIVENESS", "LATE"),
            ),
            ("no look: the next unhinted", _FOREVER, ("NO_SWEEP", "FAULTS=0", "HINTS", "ENDLESS")),
            ("no look: a call never ends", _FOREVER, ("NO_SWEEP", "FAULTS=1", "LIVENESS")),
            ("never all end with faults", _NEVER_ALL, ("WITNESS", "FAULTS=2", "LATE")),
        )
    ),
    # Not promised, and so to be found as well: else the models would promise too much.
    _refuted(
        "exclusion while a store forgets", _LEASE, _EXCLUSION, "EXCLUSION_OVER_LOSS", "LOSSES=1"
    ),
    _refuted(
        "slower to begin than visibility allows",
        _DELIVERY,
        _KEPT,
        *("SLOW_TO_BEGIN", "SKIPS", "FAULTS=2"),
    ),
)
