"""A task's message as it would be published, to be kept in a store and published later.

Guarantees
    A message that is published from the store is the one that Celery would have published: body,
    content type and encoding, headers, exchange, routing key, every property except `ONCE`, and the
    entities that have to be declared.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from kombu import Exchange, Queue
from kombu.utils.json import dumps, loads

from ..celery_compat import exchange_of, serialized
from .header import header_of

#: Properties that must not be sent a second time, from another process: ``expiration`` would count
#: from the later publish, and RabbitMQ would remove an expired message without a word (Celery's own
#: ``expires`` is a header). SQS would delay the message again, or, within five minutes, discard it
#: as a duplicate. RabbitMQ refuses a ``user_id`` other than that of the connection.
ONCE: Final = frozenset(
    ("expiration", "DelaySeconds", "delay_seconds", "MessageDeduplicationId", "user_id")
)
# Options of kombu's `Producer.publish` that describe the request, not the message.
_OF_THE_REQUEST: Final = (
    *("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate"),
)
# These, and those that the stored body has been through.
_NOT_KEPT: Final = {
    *_OF_THE_REQUEST,
    *("serializer", "compression", "content_type", "content_encoding", "headers", "declare"),
    *("exchange", "delivery_mode"),
    *ONCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message.

    Attributes:
        body: The body, serialized and compressed.
        content_type, content_encoding: Those of the body.
        headers: The headers.
        exchange: The exchange's name.
        properties: The routing key and the further options of kombu's `Producer.publish`.
        declare: The entities that are declared first.
        at: The time of the call, or of its retry, in seconds since the epoch.
    """

    body: str | bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    exchange: str
    properties: Mapping[str, Any]
    declare: tuple[Exchange | Queue, ...] = field(default=())
    at: float = 0.0

    @property
    def broker(self) -> str:
        """The broker of the app that made the call (``Runtime.broker``); empty: unknown."""
        broker = header_of(self.headers, str(self.headers.get("id"))).get("broker")
        return broker if isinstance(broker, str) else ""

    @classmethod
    def of(
        cls, producer: Any, body: Any, options: Mapping[str, Any], *, at: float = 0.0
    ) -> StoredMessage:
        """The message that ``producer.publish(body, **options)`` would send.

        Raises:
            EncodeError: The body can't be serialized.
        """
        headers = dict(options.get("headers") or {})
        data, content_type, content_encoding = serialized(producer, body, options, headers)
        exchange, delivery_mode = exchange_of(producer, options)
        kept = {name: value for name, value in options.items() if name not in _NOT_KEPT}
        return cls(
            body=data,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers,
            exchange=exchange,
            properties={**kept, "delivery_mode": delivery_mode},
            declare=tuple(options.get("declare") or ()),
            at=at,
        )

    def to_bytes(self) -> bytes:
        """The text in a store.

        Raises:
            TypeError: A header or property is no value that kombu writes as JSON.
        """
        is_text = isinstance(self.body, str)
        body = self.body if is_text else b64encode(self.body).decode()  # type: ignore[arg-type]
        fields = {
            "body": [int(is_text), body],
            "type": self.content_type,
            "encoding": self.content_encoding,
            "headers": self.headers,
            "exchange": self.exchange,
            "properties": self.properties,
            "declare": [_entity_to_json(entity) for entity in self.declare],
            "at": self.at,
        }
        # As kombu's Redis transport writes a message: headers may contain times and bytes.
        try:
            return dumps(fields, separators=(",", ":")).encode()
        except TypeError as exc:
            call = f"{self.headers.get('task')}[{self.headers.get('id')}]"
            raise TypeError(
                f"{call} can't be stored in the queue of its key: a header or property of its "
                f"message is no value of JSON ({exc})"
            ) from exc

    @classmethod
    def from_bytes(cls, text: bytes) -> StoredMessage:
        """The message of :meth:`to_bytes`.

        Raises:
            ValueError: It can't be read.
        """
        try:
            fields = loads(text)
            is_text, body = fields["body"]
            return cls(
                body=body if is_text else b64decode(body),
                content_type=fields["type"],
                content_encoding=fields["encoding"],
                headers=fields["headers"],
                exchange=fields["exchange"],
                properties=fields["properties"],
                declare=tuple(map(_entity_from_json, fields["declare"])),
                at=fields["at"],
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"this is no stored message: {exc!r}") from exc

    def publish(
        self,
        producer: Any,
        *,
        eta: float | None = None,
        queues: Mapping[str, Queue] | None = None,
        **options: Any,
    ) -> None:
        """Publish the message.

        Args:
            producer: kombu's producer.
            eta: Until when a worker keeps it, in seconds since the epoch.
            queues: The queues that are declared as they are here, by name. The arguments of a queue
                may have changed since the call, and RabbitMQ refuses the former ones.
            options: ``retry`` and others, which concern this request.
        """
        headers = dict(self.headers)
        if eta is not None:
            headers["eta"] = datetime.fromtimestamp(eta, UTC).isoformat()
        declare = self.declare
        if not options.get("retry"):  # else kombu may connect again, and has to declare again
            # kombu looks there too, but binds each entity first: 0.1 ms of a queue's turn of 3 ms.
            declared = producer.channel.connection.client.declared_entities
            declare = tuple(entity for entity in declare if hash(entity) not in declared)
        if queues is not None:
            declare = tuple(
                queues.get(entity.name, entity) if isinstance(entity, Queue) else entity
                for entity in declare
            )
        producer.publish(
            self.body,
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            headers=headers,
            exchange=self.exchange,
            declare=list(declare),
            compression="",  # the body is compressed already, and a producer may have a default
            **self.properties,
            **options,
        )


class Capture:
    """A producer that keeps the message of one task, and publishes all others.

    Celery publishes the event ``task-sent`` through the same producer.

    Args:
        producer: kombu's producer.
        task_id: The id of the task.
        at: The time, in seconds since the epoch.
    """

    def __init__(self, producer: Any, task_id: str, *, at: float) -> None:
        self._producer, self._task_id, self._at = producer, task_id, at
        #: The message, once it was published, and how it was to be published (``retry`` ...).
        self.message: StoredMessage | None = None
        self.options: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        headers = options.get("headers") or {}
        if "task" in headers and headers.get("id") == self._task_id:
            self.message = StoredMessage.of(self._producer, body, options, at=self._at)
            self.options = {name: options[name] for name in _OF_THE_REQUEST if name in options}
            return None
        return self._producer.publish(body, **options)


def _entity_to_json(entity: Exchange | Queue) -> dict[str, Any]:
    fields = entity.as_dict(recurse=True)
    return {"kind": type(entity).__name__, **_without_nulls(fields)}


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Half of an entity's text is the names of attributes that are None, which is their default.
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if value is not None
    }


def _entity_from_json(fields: Mapping[str, Any]) -> Exchange | Queue:
    rest = {name: value for name, value in fields.items() if name != "kind"}
    if fields["kind"] == "Exchange":
        return Exchange(**rest)
    exchange = rest.pop("exchange", None)
    rest.pop("bindings", None)
    return Queue(**rest, exchange=Exchange(**exchange) if exchange else None)
