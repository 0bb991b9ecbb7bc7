"""A credential provider of redis-py, like those for IAM or Entra; its user is in an ACL."""

from __future__ import annotations

import os
import time
from pathlib import Path

from redis import CredentialProvider


class Locks(CredentialProvider):
    """Reads the password at each login, because it changes, from the file LOCKS_PASSWORD."""

    def get_credentials(self) -> tuple[str, str]:
        return "locks", Path(os.environ["LOCKS_PASSWORD"]).read_text()


class Bare(CredentialProvider):
    """Gives a password without a user, which a server of a developer may not have."""

    def get_credentials(self) -> tuple[str]:
        return (os.environ.get("BARE_PASSWORD", ""),)


class Slow(Bare):
    """Waits for another server, for as long as there is the file LOCKS_GATE."""

    asked = 0

    def get_credentials(self) -> tuple[str]:
        Slow.asked += 1
        while Path(os.environ["LOCKS_GATE"]).exists():
            time.sleep(0.01)
        return super().get_credentials()
