"""A certificate authority of a test's own, and one certificate for both sides."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def find_openssl() -> str | None:
    """The program; None where it is not installed."""
    return shutil.which("openssl")


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
        """The query of a URL of etcd or ZooKeeper, whose servers ask clients for a certificate."""
        return f"ca={self.ca}&cert={self.cert}&key={self.key}"

    def redis_arguments(self, port: int) -> list[str]:
        """The arguments of a Redis server that speaks TLS to clients and replicas on ``port``."""
        return [
            *("--tls-port", str(port), "--tls-replication", "yes", "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key)),
            *("--tls-ca-cert-file", str(self.ca)),
        ]


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
