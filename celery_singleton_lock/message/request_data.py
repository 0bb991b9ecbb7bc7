"""What this library keeps on Celery's request, in one attribute of it.

Celery makes each header of a message an attribute of its request. The types here tell this
library's own values from the headers of a foreign publisher: no message can contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from ..task.run import TaskRun

#: The name of the attribute, and of its key in the request of the worker's parent: an `Arrival`,
#: and a `RequestData` when the running request has been asked for it.
ATTRIBUTE: Final = "singleton_data"


class Arrival(NamedTuple):
    """What the worker's parent adds to a message that it has received, for the pool process.

    A named tuple, because billiard pickles it for each message, and a dataclass takes longer.

    Attributes:
        nonce: The name of this delivery; empty: no worker has received the message.
        serializer: The name of the message's serializer; None: unknown.
        queue: The queue of a message that was sent to an exchange; None: none is known.
        is_unnamed: Whether the message did not name its call, and the call was named after the
            queue.
    """

    nonce: str = ""
    serializer: str | None = None
    queue: str | None = None
    is_unnamed: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Arrival:
        """What ``fields`` say: the attributes of a request by name, or the headers of a message."""
        found = fields.get(ATTRIBUTE)
        if isinstance(found, RequestData):
            return found.arrival
        return found if isinstance(found, cls) else _NOT_RECEIVED


_NOT_RECEIVED: Final = Arrival()


@dataclass(slots=True)
class RequestData:
    """What is known of a running request; of other tasks than this library's, too.

    Attributes:
        arrival: What the worker's parent has added.
        run: The run of a task of this library; None: none has begun.
        continued: The key of the claim of the message that continues it; None: none does.
        joined: The key in whose queue its next message has joined; None: none has.
        published: The number of messages that it has published, by task id.
    """

    arrival: Arrival
    run: TaskRun | None = None
    continued: str | None = None
    joined: str | None = None
    published: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Any) -> RequestData:
        """The data of ``request`` (``celery.app.task.Context``), which it keeps from now on."""
        fields = request.__dict__
        found = fields.get(ATTRIBUTE)
        if isinstance(found, cls):
            return found
        # Without prefork, the worker's request and the running one have the same Arrival, and each
        # would see what the other one changes.
        if ATTRIBUTE in fields:  # of the worker's parent, or a foreign header
            data = fields[ATTRIBUTE] = cls(found if isinstance(found, Arrival) else _NOT_RECEIVED)
            return data
        # A copy of a request without headers (`Task.push_request`) makes a header of each attribute
        # that Celery doesn't know, and a retry would publish it.
        if fields.get("headers") is None:
            fields["headers"] = {}
        own: RequestData = fields.setdefault(ATTRIBUTE, cls(_NOT_RECEIVED))
        return own
