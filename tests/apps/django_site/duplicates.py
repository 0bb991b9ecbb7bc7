"""``python -m tests.apps.django_site.duplicates``: duplicates whose results are in the database."""

from __future__ import annotations

import json
from typing import Any

import django

from tests.apps.django_site import app as app


def main() -> None:
    django.setup()
    from django.core.management import call_command
    from django.db.backends.signals import connection_created

    from tests.apps.django_site.tasks import greet_once

    call_command("migrate", verbosity=0)
    opened: list[Any] = []

    def note(connection: Any, **_: Any) -> None:
        opened.append(connection)

    connection_created.connect(note)
    once: Any = greet_once
    ids = {once.apply_async(("once",), queue="idle").id for _ in range(6)}
    still_open = [one for one in opened if one.connection is not None]
    print(json.dumps({"calls": len(ids), "opened": len(opened), "open": len(still_open)}))


if __name__ == "__main__":
    main()
