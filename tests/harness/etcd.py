"""A private etcd cluster: own ports and data, real processes, ended by their ids."""

from __future__ import annotations

import shutil
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import requests

from celery_singleton_lock.doctor.servers import mended_in
from example_project.private_server import free_port
from tests.harness.addresses import LOCAL
from tests.harness.certificates import Certificates
from tests.harness.ensemble import Ensemble, hosts

#: Seconds until a cluster has a leader: one alone on the machine, more beside other tests.
BOOT_TIMEOUT = 60.0


def find_etcd() -> str | None:
    """The path of the program, or None where it is not installed."""
    return shutil.which("etcd")


class EtcdCluster(Ensemble):
    """Members on this machine, as many as asked for.

    Args:
        members: How many; three survive the loss of one.
        tls: Clients have to speak TLS, and to show a certificate.
        options: More arguments of each.
        address: Where they listen for clients.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        tls: Certificates | None = None,
        options: Sequence[str] = (),
        address: str = LOCAL,
    ) -> None:
        binary = find_etcd()
        if binary is None:
            raise RuntimeError("etcd is not installed. Debian: apt-get install etcd-server")
        super().__init__("etcd", members, BOOT_TIMEOUT, address)
        self._tls = tls
        scheme, arguments = "http", list(options)
        if tls is not None:
            scheme = "https"
            arguments += ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
            arguments += ["--trusted-ca-file", str(tls.ca), "--client-cert-auth"]
        peers = [free_port() for _ in range(members)]
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(peers))
        self._define(
            [
                binary,
                *("--name", f"m{number}"),
                *("--data-dir", str(self._directory / f"m{number}")),
                *("--listen-client-urls", f"{scheme}://{address}:{client}"),
                *("--advertise-client-urls", f"{scheme}://{address}:{client}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", cluster),
                *("--initial-cluster-token", self._directory.name),
                *arguments,
            ]
            for number, (client, peer) in enumerate(zip(self.ports, peers, strict=True))
        )

    def url(self, path: str = "", members: tuple[int, ...] | None = None) -> str:
        """The store's URL, of all members or of those that are named."""
        place = f"{hosts(self.ports, members, self._address)}/{path}"
        return f"etcds://{place}?{self._tls.query}" if self._tls else f"etcd://{place}"

    def restart_empty(self) -> None:
        """Kill the only member, and start it again without its data."""
        self.kill(0)
        shutil.rmtree(self._directory / "m0")
        self.revive(0)

    def post(self, path: str, body: dict[str, Any], number: int = 0) -> dict[str, Any]:
        """Ask a member, around the store."""
        tls = self._tls
        options: dict[str, Any] = {"verify": tls.ca, "cert": (tls.cert, tls.key)} if tls else {}
        url = f"{'https' if tls else 'http'}://{self._address}:{self.ports[number]}/v3/{path}"
        reply: dict[str, Any] = requests.post(url, json=body, timeout=5, **options).json()
        return reply

    def leases_under(self, prefix: str) -> set[str]:
        """The etcd leases to which the keys under ``prefix`` are bound.

        There may be others without keys: a repeated request for a lease leaves one.
        """
        first, last = (b64encode(f"{prefix}{end}".encode()).decode() for end in "/0")
        found = self.post("kv/range", {"key": first, "range_end": last, "keys_only": True})
        return {entry["lease"] for entry in found.get("kvs", [])}

    def revokes_when_deposed(self) -> bool:
        """Whether this version has etcd's flaw 15247, of which the doctor warns."""
        version = self.post("maintenance/status", {})["version"]
        return bool(mended_in("etcd", tuple(map(int, version.split(".")))))

    def _leader(self) -> int | None:
        found = {number: self._status(number) for number in self._living()}
        leading = {status.get("leader", "0") for status in found.values()}
        leaders = [number for number, status in found.items() if self._leads(status)]
        agreed = len(leading) == 1 and "0" not in leading and len(leaders) == 1
        return leaders[0] if agreed else None

    def _status(self, number: int) -> dict[str, Any]:
        try:
            return self.post("maintenance/status", {}, number)
        except (requests.RequestException, ValueError):
            return {}

    @staticmethod
    def _leads(status: dict[str, Any]) -> bool:
        return bool(status) and status.get("leader") == status["header"].get("member_id")
