"""An editor completes the decorator's options, as pyright's language server lists it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import TaskOptions
from tests.conftest import missing
from tests.harness.processes import ROOT


class Editor:
    """A client of a language server over pipes, with one open file."""

    def __init__(self, server: subprocess.Popen[bytes], file: Path) -> None:
        self.server, self.uri, self.requests = server, file.as_uri(), 0
        folder = [{"uri": file.parent.as_uri(), "name": "users"}]
        self.ask("initialize", processId=None, capabilities={}, workspaceFolders=folder)
        self.send(method="initialized", params={})

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.server.stdin is not None
        self.server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.server.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.server.stdout is not None
        length = 0
        while line := self.server.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server has ended"
        message: dict[str, Any] = json.loads(self.server.stdout.read(length))
        return message

    def ask(self, method: str, **params: Any) -> Any:
        self.requests += 1
        self.send(id=self.requests, method=method, params=params)
        while True:
            message = self.receive()
            if "method" not in message:
                assert message["id"] == self.requests
                return message["result"]
            if "id" in message:  # the server asks for the editor's configuration
                wanted = message["params"].get("items", [])
                self.send(id=message["id"], result=[{} for _ in wanted])

    def complete(self, text: str) -> set[str]:
        """What is offered at the end of ``text``."""
        document = {"uri": self.uri, "languageId": "python", "version": 1, "text": text}
        self.send(method="textDocument/didOpen", params={"textDocument": document})
        lines = text.splitlines()
        end = {"line": len(lines) - 1, "character": len(lines[-1])}
        offered = self.ask("textDocument/completion", textDocument={"uri": self.uri}, position=end)
        return {item["label"] for item in offered["items"]}


@pytest.mark.slow
def test_an_editor_offers_every_option_of_the_decorator(tmp_path: Path) -> None:
    if find_spec("pyright") is None:
        missing("pyright, of the dev extra")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    with subprocess.Popen(
        [sys.executable, "-m", "pyright.langserver", "--stdio"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        try:
            editor = Editor(server, tmp_path / "tasks.py")
            start = "from celery_singleton_lock import singleton_task\n@singleton_task("
            offered = editor.complete(start)
        finally:
            server.kill()
    options = {f"{name}=" for name in TaskOptions.__annotations__}
    assert options | {"app=", "bind="} <= offered
