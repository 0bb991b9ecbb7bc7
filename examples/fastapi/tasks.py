"""The Celery app and its task: ``celery -A tasks worker -l INFO``.

One report per customer at a time.
"""

import os
import time
from pathlib import Path

from celery import Celery

from celery_singleton_lock import current_lease, singleton_task

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
FOLDER = Path(os.environ.get("REPORTS", "reports"))

app = Celery("reports", broker=REDIS_URL, backend=REDIS_URL)
app.conf.broker_connection_retry_on_startup = True


@singleton_task(
    app=app,
    name="reports.build",
    scope="customers",
    key="customer:{customer_id}",
    unique="until_done",
    acks_late=True,
    reject_on_worker_lost=True,
    ttl=30,
)
def build(customer_id: int, months: int = 3) -> str:
    """Build the report of a customer.

    ``unique="until_done"``: a request for a report that is being built gets the id of that task.
    """
    lines = [f"report of customer {customer_id}"]
    for month in range(1, months + 1):
        time.sleep(1)  # the work
        lines.append(f"month {month}: {customer_id * month} calls")
    FOLDER.mkdir(exist_ok=True)
    draft = FOLDER / f"{customer_id}.{current_lease().fence}.draft"
    draft.write_text("\n".join(lines))
    current_lease().check()  # raises LeaseLost if another worker may be building this report
    return str(draft.rename(FOLDER / f"{customer_id}.txt"))
