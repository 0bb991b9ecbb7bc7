"""The connection on which a worker waits for messages: cut off before the worker is killed.

Kombu's Redis transport takes a message from its queue in one step and notes in another that it has
it: where its worker is killed in between, the message is gone, with the lock or without it. That is
not what the demo is about, so it kills in no such moment.
"""

import redis


def client_name(prefix: str, worker: str) -> str:
    """The name of a worker's connections to the broker."""
    return f"{prefix}-{worker}"


class Consumers:
    """The workers of one run, as the broker sees them.

    Args:
        redis_url: The URL of the broker.
        prefix: The prefix of the run.
    """

    def __init__(self, redis_url: str, prefix: str) -> None:
        self._client = redis.Redis.from_url(redis_url, decode_responses=True)
        self._prefix = prefix

    def cut_off(self, worker: str) -> bool:
        """Make sure that a worker, which is stopped, has no message that it hasn't noted.

        Returns:
            Whether it has none, and gets none until it goes on. Where kombu names no connections,
            that can't be known; then it is assumed.
        """
        name = client_name(self._prefix, worker)
        clients = [client for client in self._client.client_list() if client["name"] == name]
        waiting = [client["id"] for client in clients if client["cmd"].lower() == "brpop"]
        # A reply of 1 says that it was still waiting: nothing is on its way to it. From then on the
        # server has no client to hand a message to.
        cut = [self._client.client_unblock(int(number)) for number in waiting]
        return not clients or (bool(cut) and all(cut))

    def close(self) -> None:
        self._client.close()
