"""The web application: ``uvicorn web:web``."""

from typing import Annotated

from celery.backends.asynchronous import E_RETRY_LIMIT_EXCEEDED
from celery.result import AsyncResult
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from tasks import FOLDER, app, build

from celery_singleton_lock import (
    CallOptions,
    LeaseLost,
    LockConflict,
    StoreUnavailable,
    aclaim_and_send,
    is_skipped,
)

web = FastAPI(title="Reports")

# A key and the name of a file are made of it.
CustomerId = Annotated[int, Path(ge=1, lt=2**63)]
# Seconds. A client must not decide to wait for ever: a waiting request has a connection to Redis.
Wait = Annotated[float, Query(ge=0, le=30)]


@web.post("/customers/{customer_id}/report", status_code=202)
async def order(customer_id: CustomerId) -> dict[str, str]:
    """Order a report. While it is being built, other orders get the same task."""
    once = CallOptions(unique="until_done")
    result = await aclaim_and_send(app, build.name, [customer_id], singleton=once)
    return {"task": result.id}


@web.get("/tasks/{task_id}")
def state(task_id: str) -> dict[str, str | None]:
    """The state of an order. A plain function: results are read on a thread."""
    result = AsyncResult(task_id, app=app)
    if not result.successful() or is_skipped(result.result):
        return {"state": "SKIPPED" if result.successful() else result.state, "file": None}
    return {"state": result.state, "file": result.get()}


@web.delete("/customers/{customer_id}")
async def forget(customer_id: CustomerId, wait: Wait = 0) -> dict[str, bool]:
    """Delete a customer's report, never while it is being built."""
    async with build.hold(customer_id).set(wait=wait):
        report = FOLDER / f"{customer_id}.txt"
        existed = report.exists()
        report.unlink(missing_ok=True)
    return {"deleted": existed}


@web.exception_handler(LockConflict)
async def busy(request: Request, error: LockConflict) -> JSONResponse:
    """Another request or a worker holds the customer's key."""
    return JSONResponse({"detail": "busy", "holder": error.holder}, 409, {"Retry-After": "2"})


@web.exception_handler(LeaseLost)
@web.exception_handler(StoreUnavailable)
@web.exception_handler(OperationalError)
@web.exception_handler(RedisError)
async def unavailable(request: Request, error: Exception) -> JSONResponse:
    """The lease is lost; or the lock store, the broker or the result backend does not answer."""
    return JSONResponse({"detail": "try again later"}, 503, {"Retry-After": "2"})


@web.exception_handler(RuntimeError)
async def unavailable_results(request: Request, error: RuntimeError) -> JSONResponse:
    """Celery has not reached the result backend again, which it names only in the text."""
    if str(error) != E_RETRY_LIMIT_EXCEEDED:
        raise error
    return await unavailable(request, error)
