"""Read by mypy and pyright, never run: each line says what they must say about it.

``# R: <type>`` is the whole type that reveal_type shows; ``# E: <code>`` an error, of that code in
mypy. A line without either must be accepted.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Unpack, reveal_type

from celery import Celery

from celery_singleton_lock import (
    PER_TASK,
    CallOptions,
    CeleryOptions,
    LockOptions,
    OnConflict,
    SingletonTask,
    TaskOptions,
    aclaim_and_send,
    current_lease,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.instrumentation import lease_lost
from celery_singleton_lock.testing import SingletonStore, hold_lock, lose_lease

app = Celery("typed")


@singleton_task
def bare(account_id: int, force: bool = False) -> str:
    return str(account_id)


@singleton_task()
def called(account_id: int) -> str:
    return str(account_id)


@singleton_task(key="account:{account_id}", ttl=timedelta(minutes=1), acks_late=True)
def with_options(account_id: int, *, force: bool = False) -> list[int]:
    return [account_id]


@singleton_task(app=app, key=PER_TASK)
def of_an_app() -> None: ...


@singleton_task(bind=True)
def bound(self: SingletonTask[..., Any], account_id: int) -> float:
    reveal_type(self.request.retries)  # R: int
    self.retry(countdown=1)
    return 1.0


@singleton_task(app=app, bind=True, key=("account_id",), on_conflict=OnConflict.retry(delay=2))
def bound_with_options(self: Any, account_id: int) -> dict[str, int]:
    return {"account": account_id}


@singleton_task(bind=True, key=("account_id",))
def bound_with_names(self, account_id: int) -> bytes:  # type: ignore[no-untyped-def]
    return b""


@singleton_task(bind=False, key=lambda account_id: str(account_id))
def not_bound(account_id: int) -> bytes:
    return b""


@singleton_task(app=app, bind=True, key=lambda account_id: str(account_id), acks_late=True)
def bound_with_lambda(self: Any, account_id: int) -> bytes:
    return b""


@singleton_task(bind=True, key="account:{account_id}", autoretry_for=(OSError,), retry_backoff=True)
def bound_with_template(self: Any, account_id: int) -> bytes:
    return b""


@singleton_task(app=app, bind=True, key=PER_TASK, unique="until_done")
def bound_per_task(self: Any, account_id: int) -> bytes:
    return b""


# Mistyped options and wrong values.
singleton_task(app=app, key=5)  # E: call-overload
singleton_task(ky="x")  # E: call-overload
singleton_task(bind=True, tll=5)  # E: call-overload,call-overload
singleton_task(ttl="5")  # E: call-overload
singleton_task(limit=1.5)  # E: call-overload
singleton_task(on_conflict="skipp")  # E: call-overload
singleton_task(on_lost="skip")  # E: call-overload
singleton_task(on_store_error="skip")  # E: call-overload
singleton_task(unique="until_end")  # E: call-overload
singleton_task(on_duplicate="wait")  # E: call-overload
singleton_task(needs_fence="yes")  # E: call-overload
singleton_task(ack_late=True)  # E: call-overload
singleton_task(autoretry_for=OSError)  # E: call-overload


class OfMine(SingletonTask[..., Any]):
    singleton = {"ttl": 5, "scope": "billing"}  # noqa: RUF012


class Mistyped(SingletonTask[..., Any]):
    singleton = {"tll": 5}  # noqa: RUF012  # E: assignment


@singleton_task(app=app, base=OfMine)
def with_base(account_id: int) -> bytes:
    return b""


# A decorator of one's own.
def billing_task(**options: Unpack[TaskOptions]) -> None:
    singleton_task(app=app, **options)


billing_task(ttl=5, on_conflict="retry", queue="billing")
billing_task(tll=5)  # E: call-arg
billing_task(ttl="5")  # E: arg-type
lock: LockOptions = {"key": ("account_id",), "limit": 3}
app.task(base=SingletonTask, singleton=LockOptions(limit=3, key=PER_TASK))
app.task(base=SingletonTask, singleton=LockOptions(limt=3))  # E: typeddict-unknown-key
singleton_task(**LockOptions(on_conflict="skp"))  # E: typeddict-item
singleton_task(**LockOptions(tll=3))  # E: typeddict-unknown-key
CeleryOptions(acks_late=True, queue="billing")
CeleryOptions(ack_late=True)  # E: typeddict-unknown-key


@singleton_task(app=app, bind=True, **LockOptions(ttl=3, key=PER_TASK))
def with_lock_options(self: Any, account_id: int) -> bytes:
    return b""


reveal_type(with_lock_options)  # R: SingletonTask[[account_id: int], bytes]
LockOptions(queue="billing")  # E: typeddict-unknown-key


reveal_type(bare)  # R: SingletonTask[[account_id: int, force: bool =], str]
reveal_type(called)  # R: SingletonTask[[account_id: int], str]
reveal_type(with_options)  # R: SingletonTask[[account_id: int, *, force: bool =], list[int]]
reveal_type(of_an_app)  # R: SingletonTask[[], None]
reveal_type(bound)  # R: SingletonTask[[account_id: int], float]
reveal_type(bound_with_options)  # R: SingletonTask[[account_id: int], dict[str, int]]
reveal_type(bound_with_names)  # R: SingletonTask[[account_id: int], bytes]
reveal_type(bound_with_lambda)  # R: SingletonTask[[account_id: int], bytes]
reveal_type(bound_with_template)  # R: SingletonTask[[account_id: int], bytes]
reveal_type(bound_per_task)  # R: SingletonTask[[account_id: int], bytes]
reveal_type(with_base)  # R: SingletonTask[[account_id: int], bytes]
reveal_type(not_bound)  # R: SingletonTask[[account_id: int], bytes]

# The call itself, and the ways to send it.
reveal_type(bare(1))  # R: str
reveal_type(bound(1))  # R: float
reveal_type(bare.delay(1, force=True))  # R: AsyncResult[str]
reveal_type(bound.delay(account_id=1).get())  # R: float
reveal_type(bound_with_names.delay(1))  # R: AsyncResult[bytes]
reveal_type(bare.apply_async((1,)))  # R: AsyncResult[str]
reveal_type(bare.apply((1,)))  # R: EagerResult[str]
reveal_type(bare.lock_key(1))  # R: str | None
bare("1")  # E: arg-type
bare.delay("1")  # E: arg-type
bare.delay()  # E: call-arg
bound.delay(None, 1)  # E: call-arg,arg-type
bare.delay_on_commit(1, force=True)
bare.delay_on_commit("1")  # E: arg-type
bare.apply_async_on_commit((1,), countdown=60)
bound_with_names.delay("1")  # E: arg-type
bound_with_lambda.delay("1")  # E: arg-type
bound_per_task.delay(force=True)  # E: call-arg
bare.lock_key("1")  # E: arg-type
bare.apply_async((1,), countdown=5, singleton={"ttl": 5, "on_conflict": "retry"})
bare.apply_async((1,), singleton={"tll": 5})  # E: arg-type
bare.apply_async((1,), singleton={"key": "x"})  # E: arg-type
bare.apply_async((1,), singleton={"ttl": "5"})  # E: arg-type
bare.apply_async((1,), singleton={"on_conflict": "retrry"})  # E: arg-type
options: CallOptions = {"on_conflict": OnConflict.wait(timeout=3)}
bare.apply_async(kwargs={"account_id": 1}, singleton=options)

# A singleton task is a task.
bare.s(1) | bare.si(2)
bare.name.upper()

# Leases.
with hold("account:1", scope="accounts", ttl=timedelta(minutes=1), wait=5, app=app) as lease:
    reveal_type(lease)  # R: Lease
    reveal_type(lease.fence)  # R: int
    reveal_type(lease.remaining())  # R: float
    reveal_type(lease.lost)  # R: bool
    lease.check()
hold("account:1")  # E: call-arg


async def coroutine() -> None:
    async with hold("account:1", scope="accounts", wait=5, app=app) as lease:
        reveal_type(lease)  # R: Lease
    reveal_type(await decorated_async(1))  # R: str
    options: CallOptions = {"unique": "until_done"}
    result = await aclaim_and_send(app, "bare", [1], singleton=options)
    reveal_type(result.id)  # R: str


@hold("account:1", scope="accounts")
def decorated(x: int) -> str:
    return str(x)


@hold("account:1", scope="accounts")
async def decorated_async(x: int) -> str:
    return str(x)


reveal_type(decorated(1))  # R: str
decorated("1")  # E: arg-type
reveal_type(current_lease())  # R: Lease
reveal_type(is_skipped(bare.apply((1,))))  # R: bool
value = bare.delay(1).get()
if is_skipped(value):
    reveal_type(value)  # R: Mapping[str, Any]
else:
    reveal_type(value)  # R: str
OnConflict.wait(timeout="5")  # E: arg-type


@lease_lost.connect
def receive(sender: str, event: object, **_: object) -> None: ...


# What users' tests have.
def uses_the_fixture(singleton_store: SingletonStore) -> None:
    singleton_store.clock.advance(5)
    reveal_type([record.key for record in singleton_store.held()])  # R: list[str]
    with hold_lock(bare, 1) as held:
        reveal_type(held)  # R: Lease
    reveal_type(lose_lease(app=app))  # R: Lease
