"""The options of a task: merged by one pure function, refused where they are written."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import PER_TASK, OnConflict, Rate
from celery_singleton_lock.on_conflict import ACTIONS
from celery_singleton_lock.option_values import OnDuplicate, OnLost, OnStoreError, Unique, seconds
from celery_singleton_lock.policy import APP_OPTIONS, CALL_OPTIONS, Policy, check_call, merge


def policy(**options: Any) -> Policy:
    return merge(Policy(), options, where="@singleton_task on app.sync")


def test_no_layer_turns_on_what_a_lower_one_has_off() -> None:
    """An operator switches an app off, whatever its tasks say."""
    off = policy(enabled=False)
    assert not merge(off, {"enabled": True, "ttl": 9}, where="task").enabled
    assert not merge(policy(), {"enabled": False}, where="task").enabled
    assert policy().enabled
    assert policy(enabled=True).enabled


def test_what_is_left_out_comes_from_the_lower_layer() -> None:
    app = policy(ttl=10, on_conflict="retry")
    task = merge(app, {"ttl": 20, "key": PER_TASK}, where="task")
    call = merge(task, {"on_conflict": "raise"}, where="call")
    assert (call.ttl, call.key, call.on_conflict.action) == (20, PER_TASK, "raise")
    assert (app.ttl, Policy().ttl) == (10, 60)


@pytest.mark.parametrize(
    ("given", "interval", "text"),
    [
        ("10/m", 6.0, "10/m"),
        ("2/s", 0.5, "2/s"),
        ("100/h", 36.0, "100/h"),
        ("2/d", 43200.0, "2/d"),
        ("0.5/s", 2.0, "0.5/s"),
        ("4", 0.25, "4"),
        (4, 0.25, "4/s"),
        (0.1, 10.0, "0.1/s"),
        (1 / 86400, 86400.0, "0.000011574074074074073/s"),
        (Rate("10/m", burst=3), 6.0, "10/m, burst=3"),
    ],
)
def test_a_rate_is_given_in_celery_s_words(given: Any, interval: float, text: str) -> None:
    rate = policy(rate=given, on_conflict="skip").rate
    assert rate is not None
    assert (rate.interval, str(rate)) == (pytest.approx(interval), text)
    assert eval(repr(rate)) == rate
    assert not policy(rate=given, on_conflict="skip").is_plain


def test_equal_rates_are_equal_however_they_are_written() -> None:
    assert Rate("10/m") == Rate("600/h") == replace(Rate("10/m", burst=2), burst=1)
    assert Rate(5) == Rate("5") != Rate("5", burst=2)


@pytest.mark.parametrize("burst", [0, 1.5, True, "3", 2_000_000])
def test_a_wrong_burst_is_refused(burst: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Rate\(burst\)="):
        Rate("10/m", burst=burst)


def test_every_option_is_taken_in_all_its_forms() -> None:
    made = policy(
        key="x:{a}",
        scope="s",
        limit=1000,
        ttl=timedelta(minutes=2),
        max_hold=timedelta(hours=1),
        min_hold=1,
        on_conflict=OnConflict.retry(delay=timedelta(seconds=2)),
        needs_fence=False,
        hold_on_retry=False,
        on_lost="continue",
        on_store_error="run",
        unique="until_done",
        unique_for=timedelta(minutes=5),
        on_duplicate="raise",
    )
    assert (made.ttl, made.max_hold, made.min_hold) == (120.0, 3600.0, 1.0)
    assert made.on_conflict.delay == 2.0
    assert (made.on_lost, made.on_store_error) == (OnLost.CONTINUE, OnStoreError.RUN)
    assert (made.unique, made.unique_for) == (Unique.UNTIL_DONE, 300.0)
    assert made.on_duplicate is OnDuplicate.RAISE
    assert isinstance(made.ttl, float)


@pytest.mark.parametrize(
    ("rule", "same"),
    [
        ({"action": "retry", "delay": 0.2, "max_delay": 0.4}, OnConflict.retry(0.2, 0.4)),
        ({"action": "retry", "max_wait": 9}, OnConflict.retry(max_wait=9)),
        ({"action": "retry"}, OnConflict.retry()),
        ({"action": "wait"}, OnConflict.wait()),
        ({"action": "cancel_running", "within": 2}, OnConflict.cancel_running(2)),
        ({"action": "cancel_running"}, OnConflict.cancel_running()),
        ({"action": "queue"}, OnConflict.queue()),
        ({"action": "skip"}, OnConflict.of("skip")),
    ],
    ids=repr,
)
def test_a_rule_that_is_a_mapping_has_the_defaults(rule: Any, same: OnConflict) -> None:
    assert merge(Policy(), {"on_conflict": rule}, where="here").on_conflict == same
    assert OnConflict.of(same.to_header()) == same


@pytest.mark.parametrize(
    ("options", "error", "remedy"),
    [
        ({"tll": 5}, TypeError, r"unknown option 'tll' \(did you mean 'ttl'\?\)"),
        ({"onconflict": "skip"}, TypeError, "did you mean 'on_conflict'"),
        ({"zzz": 1}, TypeError, r"\(known: .*ttl"),
        ({"ttl": 0}, ValueError, "at least 0.3 seconds"),
        ({"ttl": 0.1}, ValueError, "at least 0.3 seconds"),
        ({"ttl": -1}, ValueError, "not negative and below 1e9"),
        ({"ttl": float("nan")}, ValueError, "not negative and below 1e9"),
        ({"ttl": float("inf")}, ValueError, "not negative and below 1e9"),
        ({"ttl": 10**400}, ValueError, "not negative and below 1e9"),
        ({"ttl": "60"}, TypeError, "give seconds as a number, or a timedelta"),
        ({"ttl": None}, TypeError, "give seconds as a number, or a timedelta"),
        ({"ttl": True}, TypeError, "give seconds as a number, or a timedelta"),
        ({"max_hold": 0}, ValueError, "None for no bound"),
        ({"max_hold": "1h"}, TypeError, "give seconds"),
        ({"min_hold": -1}, ValueError, "not negative"),
        ({"min_hold": 20, "max_hold": 10}, ValueError, "shorter than min_hold"),
        ({"limit": 0}, ValueError, "from 1 to 1000"),
        ({"limit": 1001}, ValueError, "from 1 to 1000"),
        ({"limit": 2.0}, TypeError, "whole number"),
        ({"limit": True}, TypeError, "whole number"),
        ({"limit": 2, "needs_fence": True}, ValueError, "use limit=1"),
        ({"rate": "10/x", "on_conflict": "skip"}, ValueError, r"rate=.10/x.: give starts per time"),
        ({"rate": "0/m", "on_conflict": "skip"}, ValueError, r'such as "10/m"'),
        ({"rate": -1, "on_conflict": "skip"}, ValueError, "give starts per time"),
        ({"rate": float("nan"), "on_conflict": "skip"}, ValueError, "give starts per time"),
        ({"rate": "0.01/d", "on_conflict": "skip"}, ValueError, "from one start in 30 days"),
        ({"rate": 20_000, "on_conflict": "skip"}, ValueError, "to 10000 in a second"),
        ({"rate": True, "on_conflict": "skip"}, TypeError, "give starts per time"),
        ({"rate": (10, 60), "on_conflict": "skip"}, TypeError, "give starts per time"),
        ({"rate": "10/m"}, ValueError, 'without on_conflict: its default, "skip", would drop'),
        ({"rate": "10/m", "on_conflict": "retry"}, ValueError, 'use "queue", with which calls'),
        ({"rate": 1, "on_conflict": "cancel_running"}, ValueError, 'use "queue", with which'),
        ({"rate": "10/m", "unique": "until_start"}, ValueError, "without on_conflict"),
        (
            {"rate": "10/m", "on_conflict": "skip", "on_store_error": "run"},
            ValueError,
            "the store counts the starts",
        ),
        ({"scope": "s"}, ValueError, r'needs an explicit key.*key="account:\{account_id\}"'),
        ({"scope": "", "key": PER_TASK}, ValueError, "1 to 200 characters"),
        ({"scope": "s" * 201, "key": PER_TASK}, ValueError, "1 to 200 characters"),
        ({"scope": 1, "key": PER_TASK}, TypeError, "give a name as str"),
        ({"on_conflict": "skipp"}, ValueError, "did you mean 'skip'"),
        ({"on_conflict": 1}, TypeError, r"OnConflict.retry\(...\)"),
        ({"on_conflict": None}, TypeError, r"OnConflict.retry\(...\)"),
        (
            {"on_conflict": {"action": "retry", "max_dely": 1}},
            ValueError,
            "there is no 'max_dely'; \"retry\" has delay, max_delay, max_wait",
        ),
        (
            {"on_conflict": {"action": "wait", "max_wait": 5}},
            ValueError,
            "there is no 'max_wait'; \"wait\" has timeout",
        ),
        ({"on_lost": "ignore"}, ValueError, "known: continue, fail, retry"),
        ({"on_store_error": "retri"}, ValueError, "did you mean 'retry'"),
        ({"on_store_error": []}, ValueError, "known: raise, retry, run"),
        ({"unique": "until_don"}, ValueError, "did you mean 'until_done'"),
        ({"unique": True}, ValueError, "known: until_done, until_expired, until_start"),
        ({"unique": "until_expired"}, ValueError, "such as unique_for=600"),
        ({"unique": "until_expired", "unique_for": 0}, ValueError, "more than 0 seconds"),
        ({"uniqe": "until_done"}, TypeError, "did you mean 'unique'"),
        ({"unique_until": 5}, TypeError, "'unique_until': write unique=\"until_start\""),
        ({"unique_for": 0}, ValueError, "more than 0 seconds, or the claim ends at once"),
        ({"unique_for": -1}, ValueError, "not negative and below 1e9"),
        ({"unique_for": None}, TypeError, "give seconds as a number, or a timedelta"),
        ({"unique_for": "1h"}, TypeError, "give seconds as a number, or a timedelta"),
        ({"on_duplicate": "return_exising"}, ValueError, "did you mean 'return_existing'"),
        ({"on_duplicate": None}, ValueError, "known: raise, replace, return_existing, skip"),
        ({"given": "skip"}, TypeError, "unknown option 'given'"),
        ({"needs_fence": 1}, TypeError, "give True or False"),
        ({"hold_on_retry": "no"}, TypeError, "give True or False"),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_with_its_place_and_its_remedy(
    options: dict[str, Any], error: type[Exception], remedy: str
) -> None:
    with pytest.raises(error, match=f"^@singleton_task on app.sync: .*{remedy}"):
        policy(**options)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"unique": "until_done"}, 'Use unique="until_start"'),
        ({"unique": "until_start", "on_store_error": "run"}, 'Use on_store_error="retry"'),
    ],
)
def test_options_that_make_no_sense_with_the_newest_arguments_are_refused(
    options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"^@singleton_task on app.sync: .*{remedy}"):
        policy(on_duplicate="replace", **options)
    made = policy(on_duplicate="replace")
    assert made.on_duplicate is OnDuplicate.REPLACE, "as a default of an app's tasks"


def test_debounce_sets_what_it_needs() -> None:
    made = policy(debounce=5, debounce_max=60)
    assert (made.unique, made.on_duplicate) == (Unique.UNTIL_START, OnDuplicate.REPLACE)
    assert made.on_conflict == FOR_EVER
    made = merge(made, {"debounce": None, "debounce_max": None}, where="call")
    assert (made.debounce, made.unique) == (None, Unique.UNTIL_START)
    assert merge(policy(debounce=5), {"unique": None}, where="call").unique is None
    assert "debounce" not in APP_OPTIONS


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"debounce": 1}, 60),
        ({"debounce": 30}, 300),
        ({"debounce": 7200}, 3600),
        ({"debounce": 30, "unique_for": 20}, 20),
        ({"unique": "until_done"}, 3600),
    ],
)
def test_a_lost_debounced_message_holds_its_claim_for_some_periods(
    options: dict[str, Any], seconds: float
) -> None:
    made = policy(**options)
    assert made.unique_for == seconds
    off = merge(made, {"debounce": None, "debounce_max": None}, where="call")
    assert off.unique_for == options.get("unique_for", 3600)
    on = merge(off, {"unique": "until_start", "debounce": 20}, where="call")
    assert on.unique_for == options.get("unique_for", 200)
    of_app = merge(Policy(), {"unique_for": 500}, where="settings")
    assert merge(of_app, {"debounce": 1}, where="task").unique_for == 500


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"debounce": 0}, "more than 0 seconds, or None"),
        ({"debounce": 5, "debounce_max": 4}, "debounce_max=4 is shorter than debounce=5"),
        ({"debounce_max": 4}, "no effect without debounce"),
        ({"debounce": 5, "unique": "until_done"}, 'Use unique="until_start"'),
        ({"debounce": 5, "on_duplicate": "skip"}, "Leave on_duplicate out"),
        ({"debounce": 5, "on_conflict": "skip"}, 'debounce=5 with on_conflict="skip": .*default$'),
        ({"debounce": 5, "on_store_error": "run"}, 'debounce=5 with on_store_error="run"'),
    ],
)
def test_options_that_make_no_sense_with_debounce_are_refused(
    options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"^@singleton_task on app.sync: .*{remedy}"):
        policy(**options)


def test_a_call_s_rule_against_its_task_s_debounce_is_refused_by_that_name() -> None:
    with pytest.raises(ValueError, match=r'^call: debounce=5 with on_conflict="skip": .*default$'):
        merge(policy(debounce=5), {"on_conflict": "skip"}, where="call")


def test_layers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"call: .*shorter than min_hold"):
        merge(policy(min_hold=20), {"max_hold": 10}, where="call")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: OnConflict.retry(delay=-1), r"delay\)=-1"),
        (lambda: OnConflict.retry(max_delay="x"), "max_delay"),
        (lambda: OnConflict.retry(max_wait=float("nan")), "max_wait"),
        (lambda: OnConflict.wait(timeout=None), "timeout"),
        (lambda: OnConflict.of({"action": "retri"}), "did you mean 'retry'"),
        (lambda: OnConflict.of({"action": "retry", "delay": "1"}), "delay"),
        (lambda: OnConflict.of({"action": "skip", "timeout": 3}), "'timeout'; \"skip\" has no opt"),
        (lambda: OnConflict.of({"action": "wait", "max_wait": 9}), "'max_wait'; \"wait\" has tim"),
        (lambda: OnConflict(action="retry"), r"write OnConflict.retry\(...\), OnConflict.wait"),
    ],
    ids=[
        *("delay", "max_delay", "max_wait", "timeout", "action", "by hand"),
        *("skip-timeout", "wait-max_wait", "no kind"),
    ],
)
def test_a_wrong_rule_for_conflicts_is_refused_when_it_is_made(make: Any, remedy: str) -> None:
    with pytest.raises((TypeError, ValueError), match=remedy):
        make()


@pytest.mark.parametrize("rule", ["retry", OnConflict.retry(), OnConflict.retry(delay=2)], ids=repr)
def test_a_retry_never_gives_up_unless_its_user_sets_a_bound(rule: Any) -> None:
    assert policy(on_conflict=rule).on_conflict.max_wait is None
    assert policy(on_conflict=OnConflict.retry(max_wait=3600)).on_conflict.max_wait == 3600


@pytest.mark.parametrize("rule", [*map(OnConflict.of, ACTIONS)], ids=repr)
def test_a_rule_is_pickled_copied_and_printed_as_it_is_written(rule: OnConflict) -> None:
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    assert repr(rule).startswith(f"OnConflict.{rule.action}(")


def test_a_longest_delay_shorter_than_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_delay=1.0 is shorter than delay=2.0"):
        OnConflict.retry(delay=2, max_delay=1)


@pytest.mark.parametrize(
    "rule",
    [
        *map(OnConflict.of, ACTIONS),
        OnConflict.retry(2, 3, None),
        OnConflict.retry(1, 60, 10),
        OnConflict.wait(0.5),
        OnConflict.cancel_running(2, 3),
    ],
    ids=repr,
)
def test_a_rule_survives_its_message(rule: OnConflict) -> None:
    assert OnConflict.of(json.loads(json.dumps(rule.to_header()))) == rule


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["action", "delay", "max_delay", "max_wait", "timeout"]), _JSON)
    | st.fixed_dictionaries(
        {"action": st.sampled_from(list(ACTIONS))},
        optional=dict.fromkeys(("delay", "max_delay", "max_wait", "timeout"), _JSON),
    )
    | _JSON
)
def test_a_rule_from_elsewhere_is_read_or_refused_with_a_known_error(value: Any) -> None:
    try:
        rule = OnConflict.of(value)
    except (TypeError, ValueError, KeyError):
        return
    given = [getattr(rule, name) for name in rule.options()]
    assert all(value is None or 0 <= value < 1e9 for value in given)


def test_seconds_are_numbers_or_timedeltas() -> None:
    assert seconds("x", timedelta(milliseconds=1500)) == 1.5
    assert seconds("x", 0) == 0.0


def test_which_layer_may_set_what() -> None:
    assert {"ttl", "on_conflict"} <= CALL_OPTIONS
    assert not {"key", "scope", "limit", "min_hold", "rate"} & (CALL_OPTIONS | APP_OPTIONS)
    assert {"unique", "unique_for", "on_duplicate"} <= CALL_OPTIONS & APP_OPTIONS
    assert "given" not in CALL_OPTIONS | APP_OPTIONS


# --- unique="until_start": the one waiting call represents all others ----------------------------

FOR_EVER = OnConflict.retry()
LAYERS = ["the app's settings", "the task", "the call"]


def layered(*layers: dict[str, Any]) -> Policy:
    made = Policy()
    for where, options in zip(LAYERS, layers, strict=False):
        made = merge(made, options, where=where)
    return made


def test_unless_it_is_asked_for_nothing_is_unique_and_nothing_waits() -> None:
    assert (Policy().unique, Policy().unique_for) == (None, 3600.0)
    assert Policy().on_duplicate is OnDuplicate.RETURN_EXISTING
    assert policy(unique="until_done").on_conflict == Policy().on_conflict
    assert policy(unique=None, on_conflict=OnConflict.retry(max_wait=5)).on_conflict.max_wait == 5


@pytest.mark.parametrize("layer", range(3), ids=LAYERS)
def test_a_call_that_is_unique_until_its_start_waits_as_long_as_it_takes(layer: int) -> None:
    layers: list[dict[str, Any]] = [{}, {}, {}]
    layers[layer] = {"unique": "until_start"}
    made = layered(*layers)
    assert (made.unique, made.on_conflict) == (Unique.UNTIL_START, FOR_EVER)


@pytest.mark.parametrize("layer", range(3), ids=LAYERS)
@pytest.mark.parametrize("above", range(3), ids=lambda above: f"{above} layers above")
@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("retry", FOR_EVER),
        (OnConflict.retry(2, 3), OnConflict.retry(2, 3, None)),
        (OnConflict.retry(2, 3, None), OnConflict.retry(2, 3, None)),
        ("wait", OnConflict.wait()),
        (OnConflict.wait(7), OnConflict.wait(7)),
        ("raise", OnConflict.of("raise")),
    ],
    ids=repr,
)
def test_a_rule_that_drops_no_call_stands_beside_it_through_all_layers(
    layer: int, above: int, rule: Any, becomes: OnConflict
) -> None:
    # Said in one layer together, or on_conflict in a later one; what stands above says neither.
    for unique_in in range(layer + 1):
        layers: list[dict[str, Any]] = [{}, {}, {}]
        layers[unique_in]["unique"] = "until_start"
        layers[layer]["on_conflict"] = rule
        for later in range(layer + 1, min(3, layer + 1 + above)):
            layers[later] = {"ttl": 5, "unique": "until_start"} if above > 1 else {"ttl": 5}
        assert layered(*layers).on_conflict == becomes


@pytest.mark.parametrize("layer", range(3), ids=LAYERS)
@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        (
            "skip",
            'on_conflict="skip": .*would be dropped.*on_conflict="retry".*unique="until_done"',
        ),
        ("revoke", 'on_conflict="revoke": .*would be dropped'),
        (OnConflict.retry(max_wait=10), "max_wait=10: .*Drop max_wait"),
        (OnConflict.retry(max_wait=0), "max_wait=0: .*Drop max_wait"),
    ],
    ids=repr,
)
def test_a_rule_that_drops_the_waiting_call_is_refused_where_it_is_written(
    layer: int, rule: Any, remedy: str
) -> None:
    for unique_in in range(layer + 1):
        layers: list[dict[str, Any]] = [{}, {}, {}]
        layers[unique_in]["unique"] = "until_start"
        layers[layer]["on_conflict"] = rule
        with pytest.raises(ValueError, match=f"^{LAYERS[layer]}: .*{remedy}"):
            layered(*layers)


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("skip", FOR_EVER),
        ("revoke", FOR_EVER),
        ("raise", FOR_EVER),
        (OnConflict.wait(7), FOR_EVER),
        ("retry", FOR_EVER),
        (OnConflict.retry(2, 3, 4), OnConflict.retry(2, 3, None)),
    ],
    ids=repr,
)
def test_a_rule_of_a_lower_layer_was_meant_for_other_tasks(rule: Any, becomes: OnConflict) -> None:
    below = {"on_conflict": rule}
    assert layered(below, {"unique": "until_start"}).on_conflict == becomes
    assert layered(below, {}, {"unique": "until_start"}).on_conflict == becomes
    assert layered({}, below, {"unique": "until_start"}).on_conflict == becomes


@pytest.mark.parametrize("unique", [None, "until_done"])
@pytest.mark.parametrize(
    "rule", ["skip", "revoke", "raise", OnConflict.wait(7), OnConflict.retry(2, 3, 4)], ids=repr
)
def test_a_layer_that_takes_it_back_gets_the_rule_as_it_was_said(unique: Any, rule: Any) -> None:
    until_start, back = {"unique": "until_start"}, {"unique": unique}
    said = OnConflict.of(rule)
    assert layered({"on_conflict": rule}, until_start, back).on_conflict == said
    assert layered(until_start, {**back, "on_conflict": rule}).on_conflict == said
    assert layered(until_start, back, {"on_conflict": rule}).on_conflict == said
    assert layered(until_start, back) == layered({}, back)
    bounded = OnConflict.retry(max_wait=7)
    assert layered({"on_conflict": bounded}, until_start, back).on_conflict.max_wait == 7


def test_how_long_a_claim_stands_is_said_by_the_highest_layer() -> None:
    made = layered({"unique_for": 10}, {"unique_for": timedelta(seconds=20)}, {"unique_for": 0.5})
    assert made.unique_for == 0.5
    assert layered({"unique_for": 10}, {"unique": "until_done"}).unique_for == 10


def test_a_period_is_given_where_until_expired_is_and_a_higher_layer_may_change_it() -> None:
    own = {"unique": "until_expired", "unique_for": 20}
    assert layered(own, {"unique_for": 5}).unique_for == 5
    assert layered({"unique": "until_done", "unique_for": 7}, own).unique_for == 20
    with pytest.raises(ValueError, match=r"without unique_for.*600"):
        layered({"unique_for": 10}, {"unique": "until_expired"})


@pytest.mark.parametrize(
    "contradiction",
    [
        {"on_store_error": "run"},
        {"on_lost": "continue"},
        {"hold_on_retry": False},
        {"unique": "until_start", "on_duplicate": "replace"},
    ],
)
def test_what_breaks_the_order_of_a_queue_is_refused_with_it(contradiction: Any) -> None:
    name = [*contradiction][-1]
    with pytest.raises(ValueError, match=rf'on_conflict="queue" with {name}='):
        policy(on_conflict="queue", **contradiction)


def test_a_queue_with_a_limit_has_no_cooldown() -> None:
    assert policy(on_conflict="queue", limit=3, key="k").limit == 3
    with pytest.raises(ValueError, match=r"with limit=3 and min_hold=5: .* use limit=1, or a rate"):
        policy(on_conflict="queue", limit=3, key="k", min_hold=5)


@pytest.mark.parametrize(("task", "call"), [("queue", "skip"), ("skip", "queue")])
def test_a_call_can_not_leave_the_queue_of_its_task_or_enter_one(task: str, call: str) -> None:
    with pytest.raises(ValueError, match="the order of a key is that of all its calls"):
        check_call(lambda: policy(on_conflict=task), {"on_conflict": call}, where="call")


def test_a_queue_takes_ten_thousand_calls_by_default_and_a_number_is_kept_in_a_message() -> None:
    assert policy(on_conflict="queue").on_conflict.max_waiting == 10_000
    few = OnConflict.queue(max_waiting=2)
    assert OnConflict.of(json.loads(json.dumps(few.to_header()))) == few
    with pytest.raises(ValueError, match="max_waiting"):
        OnConflict.queue(max_waiting=0)
    assert policy(on_conflict="queue").on_conflict.max_crashes == 20
    endless = OnConflict.queue(max_crashes=None)
    assert OnConflict.of(endless.to_header()) == endless
    with pytest.raises(ValueError, match="max_crashes"):
        OnConflict.queue(max_crashes=0)
