"""A credential provider of redis-py, like those for IAM or Entra; its user is in an ACL."""

from __future__ import annotations

import os
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
