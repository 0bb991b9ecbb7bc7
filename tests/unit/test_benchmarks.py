"""What the benchmarks make of what they measure; measuring itself is no test."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter

import pytest

from tests.benchmarks.contest import Cost, Result, Role
from tests.benchmarks.handoff import Handoff, summary
from tests.benchmarks.instructions import Path
from tests.benchmarks.instructions import as_table as instructions_table
from tests.benchmarks.queuers import Turn
from tests.benchmarks.report import as_data, as_table, behind
from tests.benchmarks.samples import Spread, ratios, spread
from tests.benchmarks.section import replace_section
from tests.benchmarks.wire import Count, Happening, Wire, count
from tests.costs.instructions import Instructions
from tests.harness.processes import ROOT

ONE = Count(requests=1, round_trips=1)
TWO = Count(requests=2, round_trips=2)


def result(peer: float, peer_cost: Count = ONE, role: Role = Role.PEER) -> Result:
    return Result(
        roles={"ours": Role.OURS, "theirs": role},
        seconds={"ours": [[0.001] * 3] * 4, "theirs": [[0.001 * peer] * 3] * 4},
        costs={"ours": Cost(ONE, ONE), "theirs": Cost(peer_cost, ONE)},
    )


# --- numbers -------------------------------------------------------------------------------------


def test_half_of_the_numbers_lie_within_the_spread() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_ratio_is_taken_within_each_round_so_a_slow_spell_cancels_out() -> None:
    measured = {"ours": [[1.0, 1.0], [50.0, 50.0]], "theirs": [[2.0, 2.0], [100.0, 100.0]]}
    assert ratios(measured, "ours")["theirs"] == Spread(2.0, 2.0, 2.0)


# --- hand-off ------------------------------------------------------------------------------------


def test_a_handoff_is_from_a_release_to_the_next_start_of_one_that_waited() -> None:
    turns = [
        Turn(asked=0.0, began=1.0, ended=2.0),
        Turn(asked=0.5, began=2.25, ended=3.0),
        Turn(asked=3.1, began=3.2, ended=4.0),  # came after the release, and overtook the next
        Turn(asked=0.5, began=4.25, ended=5.0),
        Turn(asked=0.5, began=None, ended=9.0),  # never had it, but has waited
    ]
    found = summary(turns, commands=12)
    assert found == Handoff(
        turns=4, p50=0.25, p99=0.25, wait=1.75, longest=8.5, overtaken=0.25, commands=3.0
    )


def test_a_path_may_take_a_tenth_more_instructions_than_are_published() -> None:
    found = Instructions(Counter({"run.py: TaskRun.run": 1100}))
    longer = Instructions(Counter({"inspect.py: signature": 1101}))
    assert [Path(found, 1000).exceeds, Path(longer, 1000).exceeds] == [False, True]
    assert not Path(found, None).exceeds
    table = instructions_table({"kept": Path(found, 1000), "long": Path(longer, 1000)})
    assert "| kept | 1100 | 1000 | +10.0 %, at most +10 %: kept |" in table
    assert "| long | 1101 | 1000 | +10.1 %, at most +10 %: **exceeded** |" in table


# --- round trips ---------------------------------------------------------------------------------


def sent(server: int, *, thread: int = 1, blocking: bool = True) -> Happening:
    return Happening(True, thread, server, server, blocking)


def received(server: int, *, thread: int = 1, blocking: bool = True) -> Happening:
    return Happening(False, thread, server, server, blocking)


def test_a_client_that_asks_one_server_after_the_other_waits_for_each() -> None:
    one_by_one = [one for server in range(5) for one in (sent(server), received(server))]
    assert count(one_by_one) == Count(requests=5, round_trips=5)


def test_a_client_that_asks_all_servers_at_once_waits_once_though_replies_come_early() -> None:
    early = [happening(n, blocking=False) for n in range(5) for happening in (sent, received)]
    assert count(early) == Count(requests=5, round_trips=1)
    assert count(early * 2) == Count(requests=10, round_trips=2)


def test_threads_that_ask_a_server_each_wait_at_once() -> None:
    threads = [one for n in range(3) for one in (sent(n, thread=n), received(n, thread=n))]
    assert count(threads) == Count(requests=3, round_trips=1)


def test_a_pipeline_is_one_request_and_a_reply_in_two_parts_is_one_reply() -> None:
    assert count([sent(1), sent(1), received(1), received(1)]) == ONE
    assert count([]) == Count(requests=0, round_trips=0)


def test_the_wire_counts_what_real_sockets_do_and_only_with_the_servers_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as named,
        socket.create_server(("127.0.0.1", 0)) as unnamed,
    ):
        for server, connections in ((named, 2), (unnamed, 1)):
            threading.Thread(target=echo, args=(server, connections), daemon=True).start()
        wire = Wire({named.getsockname()[1]})
        with wire.listening():
            for server in (named, unnamed):
                with socket.create_connection(server.getsockname(), timeout=20) as client:
                    for _ in range(2):
                        client.sendall(b"x")
                        assert client.recv(1) == b"x"
        assert wire.take() == TWO
        with socket.create_connection(named.getsockname(), timeout=20) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
        assert wire.take() == Count(0, 0)  # it listens no more


def echo(server: socket.socket, connections: int) -> None:
    for _ in range(connections):
        client, _ = server.accept()
        with client:
            while data := client.recv(1):
                client.sendall(data)


# --- the report ----------------------------------------------------------------------------------


def test_the_table_has_ours_first_and_the_ratio_of_each() -> None:
    table = as_table({"Redis": result(1.5, TWO)})
    ours, theirs = table.splitlines()[2:]
    assert ours == "| Redis | **ours** | 1000 [1000 .. 1000] | 1 | 1, 1 | 1, 1 |"
    assert theirs == "|  | theirs | 1500 [1500 .. 1500] | 1.50 [1.50 .. 1.50] | 2, 1 | 2, 1 |"
    assert as_data({"Redis": result(1.5)})["Redis"]["theirs"]["cycles"] == 12


def test_a_peer_that_is_faster_or_asks_less_is_named() -> None:
    assert behind({"Redis": result(1.01)}) == []
    assert behind({"Redis": result(0.5)}) == ["Redis: theirs takes 0.50 times our time"]
    slower_but_fewer = result(2.0, Count(requests=0, round_trips=0))
    assert behind({"Redis": slower_but_fewer}) == [
        "Redis: theirs makes fewer round trips than we do"
    ]
    assert behind({"Redis": result(0.5, role=Role.FLOOR)}) == []


def test_a_section_of_a_page_is_replaced_and_the_rest_stays() -> None:
    page = "# Title\n<!-- stores: begin -->old<!-- stores: end -->\nrest\n"
    once = replace_section(page, "stores", "new")
    assert once == "# Title\n<!-- stores: begin -->\n\nnew\n\n<!-- stores: end -->\nrest\n"
    assert replace_section(once, "stores", "new") == once
    with pytest.raises(ValueError, match="no <!-- worker: begin -->"):
        replace_section(page, "worker", "new")


# --- the page for users --------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
FULL_PAGE = (ROOT / "docs" / "dev" / "benchmarks.md").read_text()


def what_locks_add(kind: str) -> dict[str, str]:
    """The first figure of each lock in the full table for one kind of worker and task."""
    table = FULL_PAGE.split(f"**{kind}**: Celery alone takes")[1].split("**: Celery")[0]
    found = re.findall(r"^\| (?:\*\*)?(.+?)(?: in the body)?(?:\*\*)? \| (-?\d+) \[", table, re.M)
    return dict(found)


@pytest.mark.parametrize(
    ("column", "kind"),
    [(1, "solo, no-op"), (2, "solo, 10 ms"), (3, "prefork, no-op"), (4, "prefork, 10 ms")],
)
def test_the_page_for_users_has_the_figures_of_the_full_tables(column: int, kind: str) -> None:
    lines = [line for line in PAGE.splitlines() if re.search(r"\| \d+ \|$", line)]
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]
    assert len(cells) == 7
    full = what_locks_add(kind)
    assert {row[0]: row[column] for row in cells} == {row[0]: full[row[0]] for row in cells}


@pytest.mark.parametrize("figure", re.findall(r"\d[\d,.]*(?:%| µs| ms| bytes)", PAGE))
def test_each_figure_of_the_page_for_users_is_on_the_full_page(figure: str) -> None:
    number = re.escape(figure.rstrip("% µmsbyte"))
    assert re.search(rf"(?<![\d.,]){number}(?!,?\d|\.\d)", FULL_PAGE), figure
