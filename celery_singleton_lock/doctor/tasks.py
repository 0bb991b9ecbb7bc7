"""Checks of an app's tasks: their policies, their time limits, and what they survive."""

from __future__ import annotations

from typing import Any, Final

from ..beat.election import check_leader_ttl
from ..celery_compat import retries_lost_worker
from ..errors import DOCS, SettingsError
from ..option_values import OnDuplicate
from ..policy import Policy
from ..runtime import singleton_tasks
from ..worker.bootstep import OFF, check_results, names_of, task_problems
from .context import Context, Findings, error, note, ok, warning

_KILLED_PAGE: Final = f"{DOCS}how-to/killed.html"
_UNREACHABLE_PAGE: Final = (
    f"{DOCS}troubleshooting.html#a-worker-doesnt-stop-while-its-redis-broker-is-unreachable"
)
# kombu's transports that connect to a Redis server, by the scheme of the broker's URL.
_REDIS_BROKERS: Final = {"redis", "rediss", "valkey", "valkeys", "sentinel", "sentinels"}


def check_policies(context: Context) -> Findings:
    """Settings and policies with which a beat or a worker would refuse to start."""
    try:
        check_leader_ttl(context.runtime)
    except SettingsError as exc:
        yield error("beat", str(exc), "no beat that elects a leader starts")
    tasks = singleton_tasks(context.app)
    if not tasks:
        text = "no singleton task is registered in this app"
        remedy = "name the app of your workers with -A, and have it import its tasks (include=...)"
        yield warning("tasks", text, remedy)
        return
    if problems := list(task_problems(context.app, context.store)):
        for problem in problems:
            yield error("tasks", problem, "no worker starts before this is corrected")
        return
    yield ok("tasks", f"{len(tasks) - len(context.off_tasks)} with a lock")
    for problem, remedy in check_results(context.app):
        yield warning("tasks", problem, remedy)


def check_switch(context: Context) -> Findings:
    """Whether tasks run without their locks, because these are switched off."""
    if by := context.settings.off_by:
        text = f"the locks of all tasks are off ({by}): two runs may overlap"
        yield warning("switch", text, f"remove it to have locks again, see {OFF}")
    elif context.off_tasks:
        names = ", ".join(context.off_tasks)
        text = f"the locks of some tasks are off (enabled=False): {names}"
        yield warning("switch", text, f"remove it to have locks again, see {OFF}")


def check_timeouts(context: Context) -> Findings:
    """The ttl and the time limits, compared with the broker's visibility timeout."""
    timeout, ttls = context.settings.visibility_timeout, context.ttls_by_task
    if timeout is None:
        return
    # check_policies reports the other tasks.
    tasks = [task for task in singleton_tasks(context.app) if task.name in ttls]
    # Only the messages of acks_late tasks come back.
    if names := names_of(t for t in tasks if t.acks_late and ttls[t.name] > timeout):
        yield warning(
            "timeouts",
            f"ttl is longer than visibility_timeout ({timeout:g} s) of {names}: a dead worker's "
            "message is delivered again before its lease has ended, and waits",
            "a ttl below visibility_timeout",
        )
    if names := names_of(t for t in tasks if (context.policies[t.name].debounce or 0) > timeout):
        yield note(
            "timeouts",
            f"debounce is longer than visibility_timeout ({timeout:g} s) of {names}: workers "
            f"requeue each message every {context.settings.longest_countdown:g} s until it is due, "
            "and many such messages delay each other",
            "visibility_timeout above the longest debounce, in broker_transport_options",
        )
    if names := names_of(t for t in tasks if t.acks_late and _time_limit(t) > timeout):
        yield note(
            "timeouts",
            f"acks_late, with a time limit above visibility_timeout ({timeout:g} s) or none: "
            f"{names}. The message of a longer run is delivered again; the copies wait, and are "
            "dropped when it is done",
            "visibility_timeout above the longest run, in broker_transport_options, and a "
            "time_limit below it",
        )


def check_broker(context: Context) -> Findings:
    """Whether a worker waits for a limited time while it connects to its Redis broker."""
    connection = context.app.connection_for_read()
    if connection.transport_cls not in _REDIS_BROKERS or "+socket:" in connection.as_uri():
        return
    if (connection.transport_options or {}).get("socket_connect_timeout") is None:
        yield note(
            "broker",
            "broker_transport_options has no socket_connect_timeout: a worker that shuts down "
            "while its Redis broker is unreachable can hang for minutes",
            f'"socket_connect_timeout": 5 in broker_transport_options, see {_UNREACHABLE_PAGE}',
        )


def check_lost_workers(context: Context) -> Findings:
    """Whether each task that is acknowledged late survives the death of its pool process.

    The main process acknowledges the message of a dead pool process, unless one of the options
    says otherwise.
    """
    tasks = singleton_tasks(context.app)
    if names := names_of(t for t in tasks if t.acks_late and not _survives_its_process(t)):
        yield note(
            "acks_late",
            f"acks_late without reject_on_worker_lost: {names}. If its pool process is killed (out "
            "of memory, kill -9), the task fails and does not run again",
            f"reject_on_worker_lost=True with acks_late=True, see {_KILLED_PAGE}",
        )
    # The app's setting is meant for its acks_late tasks.
    is_default = bool(context.app.conf.task_reject_on_worker_lost)
    ineffective = (t for t in tasks if t.reject_on_worker_lost and not t.acks_late)
    if not is_default and (names := names_of(ineffective)):
        yield note(
            "acks_late",
            f"reject_on_worker_lost without acks_late has no effect: {names}",
            f"acks_late=True with reject_on_worker_lost=True, see {_KILLED_PAGE}",
        )


def check_keys(context: Context) -> Findings:
    """Whether calls that replace each other's arguments can be equal."""
    tasks = singleton_tasks(context.app)
    if names := names_of(t for t in tasks if _replaces_nothing(context.policies.get(t.name))):
        yield note(
            "tasks",
            f'on_duplicate="replace" has no effect without a key: {names}. All arguments are the '
            "key, so calls with other arguments are other calls, and each runs",
            'a key that leaves out what is to be replaced, such as key="customer:{customer_id}"',
        )


def _replaces_nothing(policy: Policy | None) -> bool:
    # A debounce also decides when an equal call runs.
    return (
        policy is not None
        and policy.on_duplicate is OnDuplicate.REPLACE
        and policy.key is None
        and policy.debounce is None
    )


def _survives_its_process(task: Any) -> bool:
    return bool(task.reject_on_worker_lost or retries_lost_worker(task))


def _time_limit(task: Any) -> float:
    return float(task.time_limit or task.app.conf.task_time_limit or "inf")
