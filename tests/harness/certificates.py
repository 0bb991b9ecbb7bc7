"""A certificate authority of a test's own, and one certificate for both sides."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Certificates:
    """Made by the program ``openssl``.

    Args:
        directory: Where the files are put.

    Attributes:
        ca: The authority's certificate.
        cert: Of 127.0.0.1, for a server and for a client.
        key: Its key.
        both: Key and certificate in one file.
    """

    def __init__(self, directory: Path) -> None:
        self.ca, ca_key = directory / "ca.pem", directory / "ca.key"
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.both = directory / "both.pem"
        request, extensions = directory / "request", directory / "extensions"
        extensions.write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        new: list[str | Path] = ["req", "-newkey", "rsa:2048", "-nodes"]
        _openssl(*new, "-x509", "-subj", "/CN=tests", "-keyout", ca_key, "-out", self.ca)
        _openssl(*new, "-subj", "/CN=127.0.0.1", "-keyout", self.key, "-out", request)
        sign: list[str | Path] = [
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            self.ca,
            "-CAkey",
            ca_key,
            "-days",
            "2",
        ]
        _openssl(*sign, "-CAcreateserial", "-extfile", extensions, "-out", self.cert)
        self.both.write_text(self.key.read_text() + self.cert.read_text())

    @property
    def query(self) -> str:
        """Of a store's URL."""
        return f"ca={self.ca}&cert={self.cert}&key={self.key}"


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
