"""A credential provider of redis-py, as those for IAM or Entra are; its user is in an ACL."""

from __future__ import annotations

import os
from pathlib import Path

from redis import CredentialProvider


class Locks(CredentialProvider):
    """Reads the password each time, for it changes: from the file that LOCKS_PASSWORD names."""

    def get_credentials(self) -> tuple[str, str]:
        return "locks", Path(os.environ["LOCKS_PASSWORD"]).read_text()
