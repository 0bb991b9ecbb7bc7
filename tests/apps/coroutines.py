"""A singleton task whose coroutine holds a second key until its process is killed."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from celery import Celery

from celery_singleton_lock import hold, singleton_task

SCOPE: Final = "coroutines"

app = Celery("coroutines", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])


@singleton_task(app=app, name="hold_for_ever", key="{name}")
def hold_for_ever(name: str) -> None:
    async def body() -> None:
        async with hold(name, scope=SCOPE, ttl=600, app=app):
            await asyncio.Event().wait()

    asyncio.run(body())
