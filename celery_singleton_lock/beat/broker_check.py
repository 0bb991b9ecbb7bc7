"""The broker, as a beat sees it: asked over the connection on which the next message is sent.

Publishing alone does not show whether the broker is reachable. AMQP has no reply to a message, so
it may vanish in a connection that no server reads. kombu repeats what failed, and waits for replies
without a limit. Therefore a beat requests a reply before it stands for election and before each
tick: then an outage finds no tick that is authorized and not sent.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..celery_compat import ask_broker, limit_broker_timeouts
from ..core.clock import Clock


class Broker:
    """The connection on which a scheduler publishes.

    Args:
        connection: kombu's connection, not yet established.
        producer: The producer that publishes on it.
        clock: The clock.
        timeout: Seconds to wait for one reply.
    """

    def __init__(self, connection: Any, producer: Any, clock: Clock, timeout: float) -> None:
        limit_broker_timeouts(connection, timeout)
        self._connection = connection
        self._producer = producer
        self._clock = clock
        self._timeout = timeout
        self._replied_at = float("-inf")
        #: Whether it has refused the last message.
        self.refuses = False

    @property
    def url(self) -> str:
        """The broker's URL without its password."""
        return str(self._connection.as_uri())

    def ask(self, *, within: float = 0.0) -> None:
        """Return when the broker has replied, or if it has within the last ``within`` seconds.

        Raises:
            Exception: It does not reply; of kombu, or of the client library of its transport.
        """
        began = self._clock.now()
        if began - self._replied_at < within:
            return
        was_connected = self._connection.connected
        try:
            self._ask()
        except Exception:
            # The server, or a load balancer, may have closed an idle connection. A timeout is an
            # outage.
            if not was_connected or self._clock.now() - began >= self._timeout:
                raise
            self._ask()

    def note_refusal(self) -> None:
        """Note that it refuses a message. Connect again: there may be another server now."""
        self.refuses = True
        self._disconnect()

    def _ask(self) -> None:
        connection, producer = self._connection, self._producer
        try:
            # kombu tries each of the alternative URLs, and one of them twice.
            connection.ensure_connection(
                max_retries=len(connection.alt) or 1,
                interval_start=0,
                interval_step=0,
                interval_max=0,
                timeout=self._timeout,
            )
            ask_broker(connection, producer.channel)
        except BaseException:
            self._disconnect()
            raise
        self._replied_at = self._clock.now()

    def _disconnect(self) -> None:
        self._replied_at = float("-inf")
        # collect() closes the connection without a dialogue, which might wait again.
        with suppress(Exception):
            self._connection.collect()
        self._producer.revive(self._connection)
