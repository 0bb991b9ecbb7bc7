"""The task base class. Its hooks start and finish a task run, or publish a call.

A process that declares tasks imports this module, but most of these processes run no task. The
modules that publish and run are imported by the first hook that needs them. A worker imports all of
them in its bootstep, before its pool forks.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

from celery import Celery, Task, signals
from celery.app.task import Task as BaseTask
from celery.exceptions import Reject
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps as kombu_dumps

from ..celery_compat import dump_models, hide_setting
from ..core.key import KeyMaker, signature_of
from ..message.arguments import as_sent as see_as_sent
from ..on_conflict import Queue
from ..option_conflicts import check_autoretry, check_claim_options
from ..option_values import require
from ..policy import OPTIONS, CallOptions, Policy, check_call, merge
from .keywords import refuse_mistakes
from .signature import SingletonSignature

if TYPE_CHECKING:
    from celery.result import AsyncResult, EagerResult

    from ..runtime import Runtime
    from . import hold as holds
    from .option_types import LockOptions
    from .run import TaskRun

logger = logging.getLogger("celery_singleton_lock")

# The store's URL may contain a password, and users paste reports into issues.
hide_setting("SINGLETON_LOCK_URL")

P = ParamSpec("P")
R = TypeVar("R")

# Names instead of the classes: only a worker imports them, when it starts.
_STEP = "celery_singleton_lock.worker.bootstep:SingletonStep"
_CONSUMER_STEP = "celery_singleton_lock.worker.bootstep:MessagesStep"
_NOT_GIVEN = (None, None, None, None)
# Headers in which RabbitMQ notes the queues that dead-lettered a message, as native delays do. They
# must not reach the next message: before version 4, RabbitMQ lets no message expire into a noted
# queue again, and one with a countdown of 1 s, then of 3 s, is lost. Celery removes them since 5.6.
_DEAD_LETTER = ("x-death", "x-first-death-", "x-last-death-")

if TYPE_CHECKING:

    class _Base(Task[P, R], Generic[P, R]): ...

else:

    class _Base(Task, Generic[P, R]):
        abstract = True


class SingletonTask(_Base[P, R]):
    """A Celery task that runs one call per key at a time.

    Declare it with :func:`singleton_task`, or with
    ``@app.task(base=SingletonTask, singleton={"key": "account:{account_id}"})``.

    This class adds :meth:`hold`, :meth:`lock_key`, and names that begin with ``singleton``. All
    other names are free for your own attributes.

    Attributes:
        singleton: The options of the lock. For the others, the app's settings apply.
    """

    abstract = True
    Request = "celery_singleton_lock.worker.request:SingletonRequest"
    singleton: LockOptions | None = None
    # Whether the task run stores the state STARTED (``track_started``).
    singleton_stores_started = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_decorated" in cls.__dict__ and cls.__bases__ == (SingletonTask,):
            # The class that Celery creates for a function with base=SingletonTask does not inherit
            # from the app's own Task (Django's has delay_on_commit). The app's Task is mixed in, as
            # @singleton_task does, but without its policy.
            apps_own = cls.__dict__["app"].Task
            if not issubclass(apps_own, SingletonTask):
                cls.__bases__ = (singleton_base(apps_own),)
        super().__init_subclass__(**kwargs)
        others = [c for c in cls.__mro__ if c not in (SingletonTask, BaseTask)]
        request = next((c.__dict__["Request"] for c in others if "Request" in c.__dict__), None)
        if request is not None:
            from ..worker.request import mixed_request

            cls.Request = mixed_request(request)  # type: ignore[assignment]
        owner = next(c for c in cls.__mro__ if "__call__" in c.__dict__)
        if owner is cls or not issubclass(owner, SingletonTask):
            # The class or a mixin overrides __call__. It would run the body without a lock.
            cls.__call__ = _under_lease(owner.__dict__["__call__"])  # type: ignore[method-assign]
        if "_decorated" in cls.__dict__:
            # Celery creates this class at the first use of the task, and registers the task before
            # it binds it. An error of on_bound would be raised at that use only, and the next use
            # would find the task in the registry.
            _check(cls)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Called by Celery when the class has its app."""
        super().on_bound(app)
        app.steps["worker"].add(_STEP)
        app.steps["consumer"].add(_CONSUMER_STEP)
        if cls.track_started:
            # Celery writes STARTED before it calls the task. For a late duplicate, which will be
            # dropped, that would overwrite the result of the first run. It would also mark calls
            # that will be skipped. So the task run writes STARTED.
            cls.track_started, cls.singleton_stores_started = False, True
        if "_decorated" not in cls.__dict__:
            _check(cls)

    @staticmethod
    def singleton_preload() -> None:
        """Import the modules that task runs need. Called in the worker before its pool forks.

        Otherwise each pool child would import them within the time limit of its first task.
        """
        _task_run()
        _publish_call()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # `self.request` is the same at twice the cost. It is read once: it is a stack of a thread.
        request: Any = self.request_stack.top
        # task(...) is a plain function call, also in the task's own body.
        if request is None or request.called_directly:
            return super().__call__(*args, **kwargs)
        task_run = _task_run()
        run = task_run.of(request)
        if run is None:
            # The result may also be the value of a skipped call, which Celery stores and which is
            # no R.
            result: R = task_run(self, request).run(None, args, kwargs)
            return result
        if run.entered:
            return super().__call__(*args, **kwargs)
        run.entered = True
        return cast(R, (self.singleton_base_call or self.run)(*args, **kwargs))

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Release the lease after the result has been stored.

        On a hard time limit Celery 5.7 calls this in the worker parent while the child still lives.
        The parent has no request of this task, so nothing is released there.
        """
        request: Any = self.request_stack.top
        if request is not None and (run := _task_run().of(request)) is not None:
            run.finish(status, retval)
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    def lock_key(self, /, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Return the full key of a call with these arguments, as the store has it.

        Return None if the task's key function returns None for them: such a call takes no lock.
        If a call uses another serializer than its task, its key may differ: JSON turns tuples into
        lists.

        Raises:
            TypeError: The arguments don't fit the task's signature.
            LockKeyError: No key can be made of the arguments.
        """
        suffix = self.singleton_key_suffix(args, kwargs)
        keyspace = self._runtime().keyspace
        return None if suffix is None else keyspace.lock(self.singleton_scope, suffix)

    def hold(self, /, *args: P.args, **kwargs: P.kwargs) -> holds.hold:
        """Hold the key of a call with these arguments in a ``with`` or ``async with`` block.

        No call with the key of ``task.delay(42)`` runs while your code is inside
        ``with task.hold(42):``. To wait for the key, or to set another ``ttl`` than the task's,
        write ``task.hold(42).set(wait=5, ttl=30)``. See :class:`hold` for the rest.

        Raises:
            TypeError: The arguments don't fit the task's signature.
            LockKeyError: No key can be made of the arguments, or the key function returns None for
                them, so that the call takes no lock.
        """
        from .hold import hold_call

        return hold_call(self, args, kwargs)

    def singleton_key_suffix(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """The key after the scope, for arguments that were in no message; None: no lock.

        The task's serializer converts them: JSON turns tuples into lists, and members of a str-Enum
        into plain strings.

        Raises:
            TypeError, LockKeyError: See :meth:`lock_key`.
        """
        args, kwargs = dump_models(self, args, kwargs, self.serializer)
        args, kwargs = see_as_sent(args, kwargs, self.serializer)
        return self.singleton_key_maker.key_suffix(args, kwargs)

    def singleton_policy(self, options: Mapping[str, Any] | None = None) -> Policy:
        """This task's policy, with the ``options`` of one call on top."""
        if not options:
            return self._policy
        try:
            return merge(self._policy, options, where=f"the options of a call of {self.name}")
        except (TypeError, ValueError) as exc:
            # This library's publishers validate the options, so other software wrote this header.
            logger.warning("singleton: %.500s; the call's options are ignored", exc)
            return self._policy

    @cached_property
    def _policy(self) -> Policy:
        defaults, given = self._runtime().settings.policy, self.singleton or {}
        where = f"@singleton_task on {self.name}"
        policy = merge(defaults, given, where=where)
        # Here, because the app's settings, which are read late, may set `unique`. A process that
        # only publishes refuses its first call.
        check_claim_options(policy, given, where=where)
        check_autoretry(policy, *_autoretry_of(self), where=where)
        is_queued = isinstance(policy.on_conflict, Queue)
        if is_queued and self.app.conf.task_protocol == 1:
            raise ValueError(
                f'{where}: on_conflict="queue" needs task_protocol = 2, the default: a message '
                "of protocol 1 has no headers, by which the calls of a key are kept in order. Set "
                'task_protocol = 2, or on_conflict="retry"'
            )
        return policy

    @cached_property
    def singleton_scope(self) -> str:
        """The namespace of this task's keys."""
        return self._policy.scope or str(self.name)

    @cached_property
    def singleton_key_maker(self) -> KeyMaker:
        """The object that computes this task's keys."""
        return KeyMaker(self._policy.key, signature_of(self.run), kombu_dumps)

    def _runtime(self) -> Runtime:
        from ..runtime import Runtime

        return Runtime.of(self.app)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        singleton: CallOptions | Literal[False] | None = None,
        **options: Any,
    ) -> AsyncResult[R]:
        """Call the task, as Celery's ``apply_async`` does, with options for this call only.

        All other arguments are Celery's.

        Args:
            singleton: Options of the lock, such as ``{"ttl": 600}``. False sends the call even if
                ``unique`` would make it a duplicate, and the lock still applies.

        Raises:
            DuplicateTask: An equal call is queued or running, and ``on_duplicate`` is ``"raise"``.
            LockKeyError: ``unique`` and ``on_conflict="queue"`` need the key before sending, but
                the arguments give no key, or no stable one.
            QueueFull: The queue of the key is full (``on_conflict="queue"``).
            StoreError: The call can't join the queue of its key (``on_conflict="queue"``).
            TypeError, ValueError: ``singleton`` has an option that a call can't set, or a wrong
                value.
        """
        given = None
        if options and not OPTIONS.isdisjoint(options):
            name = min(OPTIONS.intersection(options))
            raise TypeError(
                f"apply_async({name}=...) of {self.name}: Celery would send it as a property of "
                f"the message, without an effect. Write singleton={{{name!r}: ...}}"
            )
        if singleton is not None:
            where = f"apply_async(singleton=...) of {self.name}"
            given = check_call(self.singleton_policy, singleton, where=where)
            if given and "on_conflict" in given:
                policy = self.singleton_policy(given)
                check_autoretry(policy, *_autoretry_of(self), where=where)
            if given and "debounce" in given:
                signature = signature_of(self.run)
                _refuse_default_key(self.singleton_policy(given), signature, where)

        # The apply_async of a base class may accept only args, kwargs and **options. All other
        # arguments are passed by keyword, and only if given.
        if (producer, link, link_error, shadow) != _NOT_GIVEN:
            named = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
            options |= {name: value for name, value in named.items() if value is not None}

        def send(task_id: str, options: dict[str, Any]) -> AsyncResult[R]:
            return super(SingletonTask, self).apply_async(args, kwargs, task_id=task_id, **options)

        return _publish_call()(self, args, kwargs, send, options, task_id=task_id, given=given)

    def signature(self, args: Any = None, *starargs: Any, **starkwargs: Any) -> Any:
        """As Celery's; the option ``singleton`` is checked and converted when it is set."""
        return SingletonSignature.of(super().signature(args, *starargs, **starkwargs))

    subtask = signature

    def signature_from_request(
        self,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: str | None = None,
        **extra_options: Any,
    ) -> Any:
        """As Celery's, with the options that the call has set. The request's headers lack them.

        The signature of a next attempt (a retry) also contains the name of the call. Any other
        signature is a new call.
        """
        from ..message.header import HEADER, Delivery

        request = self.request if request is None else request
        signature = super().signature_from_request(request, args, kwargs, queue, **extra_options)
        header = Delivery.of(request.__dict__).call_header()
        if extra_options.get("retries", 0) <= request.retries:
            header = {"id": header["id"], "options": header.get("options")}
        headers = signature.options.get("headers") or {}
        kept = {name: headers[name] for name in headers if not name.startswith(_DEAD_LETTER)}
        signature.options["headers"] = {HEADER: header, **kept}
        return signature

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """As Celery's; if the broker is away, a message that is acknowledged late comes back.

        Celery rejects the message of an attempt whose retry it can't publish, and the job is lost.
        Here the broker delivers it again. Any other error, such as arguments that can't be encoded,
        would come again too, so it is Celery's.
        """
        try:
            return super().retry(*args, **kwargs)
        except Reject as rejected:
            reason = rejected.args[0]
            if self.acks_late and isinstance(reason, OperationalError):
                raise Reject(reason, requeue=True) from rejected
            raise

    @cached_property
    def singleton_publishes_through_others(self) -> bool:
        """Whether a base class after SingletonTask in the MRO overrides ``apply_async``."""
        return _definer_after("apply_async", type(self)) is not BaseTask

    @cached_property
    def singleton_base_call(self) -> Callable[..., Any] | None:
        """The ``__call__`` of a base class after SingletonTask in the MRO; None: Celery's own.

        Celery's ``__call__`` is not called under the lease. Outside a worker it pushes an empty
        request over the real one, so an eager body would have no id and couldn't retry.
        """
        return None if _definer_after("__call__", type(self)) is BaseTask else super().__call__

    if TYPE_CHECKING:

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]: ...
        def apply(self, *args: Any, **kwargs: Any) -> EagerResult[R]: ...

        # Of the app's own Task, where Celery finds Django.
        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None: ...


def _check(cls: type[SingletonTask[..., Any]]) -> None:
    """Check the options and the function of a task.

    Raises:
        TypeError, ValueError: See the message.
    """
    if "_decorated" in cls.__dict__ and (wrong := sorted(OPTIONS.intersection(cls.__dict__))):
        # Celery made attributes of these options, and no code reads those attributes.
        given = ", ".join(f"{name!r}: ..." for name in wrong)
        raise TypeError(
            f"the task {cls.name} was given {', '.join(wrong)} as attributes. With "
            f"base=SingletonTask the options of the lock go into singleton={{{given}}}; "
            "@singleton_task takes them by their own names"
        )
    if cls.run is not BaseTask.run:
        is_bound = not isinstance(inspect.getattr_static(cls, "run"), staticmethod)
        name = str(cls.name or cls.__name__)
        if any(c.__name__ == "Batches" and "Strategy" in c.__dict__ for c in cls.__mro__):
            # Also a copy of the class in a user's own module.
            raise TypeError(
                f"the task {name} is of celery-batches: Batches calls the function once for many "
                "messages, outside of their requests, so no message would have a lock. Leave out "
                "SingletonTask or @singleton_task, and write `with hold(...):` in the function"
            )
        retried = _autoretry_of(cls)
        validate(cls.singleton or {}, name, cls.run, is_bound=is_bound, autoretry=retried)
        if "_decorated" in cls.__dict__:
            _refuse_keywords(cls, name)
        calls = (cls.__call__, _definer_after("__call__", cls))
        # Another __call__ may run what the function returns.
        if _runs_later(cls.run) and calls == (SingletonTask.__call__, BaseTask):
            raise TypeError(
                f"the task {name} is a coroutine or generator function: a call of it runs none "
                "of its code, so the lock would be free before the code begins. Write a "
                "function that calls asyncio.run(...)"
            )


def _refuse_keywords(cls: type[SingletonTask[..., Any]], name: str) -> None:
    """Refuse mistyped keywords of Celery's decorator, which has made attributes of them."""
    by_celery = {"app", "name", "run", "singleton", "Request"}
    keywords = {
        key: value for key, value in vars(cls).items() if key[0] != "_" and key not in by_celery
    }
    rule = (cls.singleton or {}).get("on_conflict")
    refuse_mistakes(keywords, cls.__base__, SingletonTask, where=f"the task {name}", rule=rule)


def _autoretry_of(task: Any) -> tuple[Any, Any]:
    """The ``autoretry_for`` of a task or its class, and its ``dont_autoretry_for``."""
    return getattr(task, "autoretry_for", ()), getattr(task, "dont_autoretry_for", ())


def _runs_later(body: Callable[..., Any]) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(body) for is_kind in kinds)


def _definer_after(name: str, cls: type) -> type:
    """The class after SingletonTask in the MRO of ``cls`` that defines ``name``."""
    after = cls.__mro__[cls.__mro__.index(SingletonTask) + 1 :]
    return next(base for base in after if name in base.__dict__)


def validate(
    policy: Mapping[str, Any],
    name: str,
    body: Callable[..., Any],
    *,
    is_bound: bool,
    autoretry: tuple[Any, Any] = ((), ()),
) -> None:
    """Check the ``policy`` of the task ``name``.

    Args:
        policy: The options of the policy.
        name: The name of the task in errors.
        body: The function that the task runs.
        is_bound: Whether its first argument is the task, which callers do not give.
        autoretry: Its ``autoretry_for`` and ``dont_autoretry_for``.

    Raises:
        TypeError, ValueError: An option is wrong, or the key doesn't fit the signature.
    """
    where = f"@singleton_task on {name}"
    advice = 'give a dict, such as {"ttl": 60}'
    require(isinstance(policy, Mapping), f"{where}: singleton", policy, advice, TypeError)
    merged = merge(Policy(), policy, where=where)
    if "unique" in policy:  # else the app's settings may set it
        check_claim_options(merged, policy, where=where)
    check_autoretry(merged, *autoretry, where=where)
    signature = signature_of(body, is_bound=is_bound)
    try:
        KeyMaker(merged.key, signature, json.dumps)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{where}: {exc}") from None
    _refuse_default_key(merged, signature, where)


def _refuse_default_key(policy: Policy, signature: inspect.Signature, where: str) -> None:
    """Refuse options that mean little per combination of all arguments, which is the default key.

    Raises:
        ValueError: ``policy`` has such an option and no key, and calls may have arguments.
    """
    if policy.key is not None or not signature.parameters:
        return
    given = f"limit={policy.limit}"
    if policy.limit == 1:
        if policy.debounce is None:
            return
        given = f"debounce={policy.debounce:g}"
    name = next(iter(signature.parameters))
    raise ValueError(
        f"{where}: {given} without a key would count for each combination of all arguments. Write "
        f'key=PER_TASK if it is meant for the whole task, or a template such as key="{name}:'
        f'{{{name}}}" if it is meant for each {name}'
    )


def singleton_base(base: Any) -> type:
    """``base`` (an app's own Task, Django's, a user's) with SingletonTask before it."""
    if issubclass(base, SingletonTask):
        return cast(type, base)
    attributes: dict[str, Any] = {"abstract": True, "__module__": base.__module__}
    return type(f"Singleton{base.__name__}", (SingletonTask, base), attributes)


class _ReplacedByApps(type):
    """The metaclass of :class:`EachAppsTask`, which is asked to create each subclass of it.

    Celery creates a task's class as ``type(name, (base,), {"app": app, ...})``, for each app when
    that app is finalized.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
        if attributes.get("app") is None:
            return super().__new__(cls, name, bases, attributes)
        apps_own = attributes["app"].Task
        inherited = getattr(apps_own, "singleton", None) or {}
        attributes["singleton"] = {**inherited, **attributes["singleton"]}
        base = singleton_base(apps_own)
        metaclass: Any = type(base)
        return metaclass.__new__(metaclass, name, (base,), attributes)


class EachAppsTask(SingletonTask[..., Any], metaclass=_ReplacedByApps):
    """As the base of a task: the own Task of the app in which the task is made, and its policy.

    It belongs to no app, so that the options of a shared task may contain it.
    """

    abstract = True


def _under_lease(own: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass's ``__call__`` (Flask's idiom for its context), called under the lease."""

    @wraps(own)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        if request.called_directly or _task_run().of(request) is not None:
            return own(self, *args, **kwargs)
        return _task_run()(self, request).run(own, args, kwargs)

    return call


@signals.task_postrun.connect
def _finish_rest(sender: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    """Finish a run that ``after_return`` didn't finish.

    Celery does not call ``after_return`` for Retry, Ignore, Reject and SystemExit, and a user's
    override may omit ``super()``. A task whose ``before_start`` failed has no run, but may have a
    claim.
    """
    if not isinstance(sender, SingletonTask):
        return
    request: Any = sender.request_stack.top
    if request is not None:  # other software may send the signal where no task runs
        task_run = _task_run()
        run = task_run.of(request) or task_run(sender, request)
        try:
            run.finish(state, retval)
        except BaseException:
            run.abandon()
            raise


@cache
def _task_run() -> type[TaskRun]:
    # Cached: an import statement in each task would cost ten times as much.
    from .run import TaskRun

    return TaskRun


@cache
def _publish_call() -> Callable[..., AsyncResult[Any]]:
    from ..publish.apply_async import publish_call

    return publish_call
