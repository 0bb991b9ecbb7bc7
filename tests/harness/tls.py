"""A certificate authority of our own, and a server's certificate by it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Certificates", "find_openssl"]

_DAYS = "2"
_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def find_openssl() -> str | None:
    """The program; None where it is not installed."""
    return shutil.which("openssl")


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files, in one directory."""

    directory: Path

    @classmethod
    def make(cls, openssl: str, directory: Path) -> Self:
        """An authority, and a certificate for 127.0.0.1 that it signs."""
        made = cls(directory)
        new = ["req", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS]
        steps = [
            [*new, "-x509", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.crt"],
            [*new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr"],
            [
                *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
                *("-CAcreateserial", "-days", _DAYS, "-out", "server.crt", "-extfile", "names"),
            ],
        ]
        (directory / "names").write_text(_NAMES)
        for step in steps:
            subprocess.run([openssl, *step], cwd=directory, check=True, capture_output=True)
        return made

    @property
    def authority(self) -> Path:
        """What a client has to know."""
        return self.directory / "ca.crt"

    def arguments(self, port: int) -> list[str]:
        """Of a Redis server that speaks TLS on ``port``, to clients and to its replicas."""
        return [*self.server_arguments, "--tls-port", str(port), "--tls-replication", "yes"]

    @property
    def server_arguments(self) -> list[str]:
        """Of a Redis server, but for its ``--tls-port``."""
        return [
            *("--tls-cert-file", str(self.directory / "server.crt")),
            *("--tls-key-file", str(self.directory / "server.key")),
            *("--tls-ca-cert-file", str(self.authority)),
            *("--tls-auth-clients", "no"),
        ]
