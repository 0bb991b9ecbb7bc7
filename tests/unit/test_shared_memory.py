"""What the worker parent can read of a child that is gone: real forks, real kills."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.worker import shared_memory
from celery_singleton_lock.worker.shared_memory import LeaseNote, SharedLease, SharedMemory
from tests.unit.pool_child import Child, notes_of_dead, open_pipe

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    # The children touch nothing but the record.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def held_by_a_killed_child(
    record: SharedMemory, index: int, life: Callable[[], None]
) -> list[LeaseNote]:
    return notes_of_dead(record, Child(index, life).kill())


def test_what_a_killed_child_held_is_read_by_its_parent() -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("key-1",), "t1|0.0|a", 60)
        record.note(("key-2#0", "key-2#1"), "t2|0.0|b", 1.5)

    assert held_by_a_killed_child(record, 3, life) == [
        LeaseNote(("key-1",), "t1|0.0|a", 60),
        LeaseNote(("key-2#0", "key-2#1"), "t2|0.0|b", 1.5),
    ]


def test_what_was_given_back_is_not_read() -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("key-1",), "a", 60)
        record.note(("key-2",), "b", 60)
        record.erase("a")
        record.erase("unknown")

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("key-2",), "b", 60)]


def test_a_narrowed_note_replaces_the_wide_one() -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("k#0", "k#1"), "a", 60)
        record.note(("k#1",), "a", 60)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("k#1",), "a", 60)]


def test_children_do_not_see_each_other() -> None:
    record = SharedMemory()
    children = [
        Child(index, lambda index=index: record.note((f"key-{index}",), f"t{index}", 60))
        for index in (0, 1, 511)
    ]
    for index, child in zip((0, 1, 511), children, strict=True):
        assert notes_of_dead(record, child.kill()) == [
            LeaseNote((f"key-{index}",), f"t{index}", 60)
        ]


def test_an_emptied_child_is_forgotten_and_the_others_are_not() -> None:
    record = SharedMemory()
    first = Child(0, lambda: record.note(("a",), "a", 60)).kill()
    second = Child(0, lambda: record.note(("b",), "b", 60)).kill()
    record.empty(first)
    assert notes_of_dead(record, first) == []
    assert notes_of_dead(record, second) == [LeaseNote(("b",), "b", 60)]


def test_a_successor_with_the_same_index_does_not_overwrite_what_a_dead_child_held() -> None:
    record = SharedMemory()
    dead = Child(5, lambda: record.note(("old",), "old", 60)).kill()
    successor = Child(5, lambda: record.note(("new",), "new", 60)).kill()
    assert notes_of_dead(record, dead) == [LeaseNote(("old",), "old", 60)]
    assert notes_of_dead(record, successor) == [LeaseNote(("new",), "new", 60)]


def test_forks_of_a_body_leave_the_block_of_their_living_parent_alone() -> None:
    """Each of them takes one, and a fork that dies with a lease leaves its block taken."""
    record = SharedMemory()

    def life() -> None:
        record.note(("childs",), "childs", 60)
        for number in range(6):
            fork = os.fork()
            if fork == 0:
                record.note(("forks",), f"fork-{number}", 60)
                os._exit(0)
            os.waitpid(fork, 0)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("childs",), "childs", 60)]


def test_a_row_whose_processes_all_live_has_no_block_for_another_fork() -> None:
    record = SharedMemory()

    def life(depth: int = 0) -> None:
        record.note((f"key-{depth}",), f"t{depth}", 60)
        if depth < 6:
            fork = os.fork()
            if fork == 0:
                life(depth + 1)
                os._exit(0)
            os.waitpid(fork, 0)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("key-0",), "t0", 60)]


def test_children_that_ended_with_nothing_held_use_up_no_room() -> None:
    """As with max_tasks_per_child: a child that ended well is not settled."""
    record = SharedMemory()

    def worked() -> None:
        record.note(("k",), "t", 60)
        record.erase("t")

    for _ in range(10):
        Child(0, worked).kill()
    dead = Child(0, lambda: record.note(("old",), "old", 60)).kill()
    for _ in range(10):
        Child(0, worked).kill()
    successor = Child(0, lambda: record.note(("new",), "new", 60)).kill()
    assert notes_of_dead(record, dead) == [LeaseNote(("old",), "old", 60)]
    assert notes_of_dead(record, successor) == [LeaseNote(("new",), "new", 60)]


def test_a_child_does_not_write_what_its_parent_held() -> None:
    record = SharedMemory()
    record.note(("parent",), "parent", 60)  # no pool index: covered by the ttl alone

    def life() -> None:
        record.note(("child",), "child", 60)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("child",), "child", 60)]
    assert notes_of_dead(record, os.getpid()) == []


@pytest.mark.parametrize("index", [None, 512, 100_000])
def test_a_child_without_a_row_works_without_one(index: int | None) -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("k",), "t", 60)
        record.erase("t")
        record.note(("k",), "t", 60)

    assert notes_of_dead(record, Child(index, life).kill()) == []


def granted(record: SharedMemory, key: str, token: str) -> SharedLease:
    """Note a lease, and let an event report its grant."""
    record.note((key,), token, 60)
    clock = SystemClock()
    lease = Lease(
        key=key,
        token=Token.parse(token),
        ttl=60,
        holder=Holder(),
        valid_until=clock.now() + 60,
        acquired_at=1.5,
        clock=clock,
    )
    shared = record.share(lease)
    assert shared is not None
    shared.announce(lease.acquired_at)
    return shared


def test_the_parent_reports_the_end_of_a_dead_childs_lease_unless_the_child_has() -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("silent",), "t1|0.0|a", 60)
        granted(record, "held", "t2|0.0|b")
        granted(record, "released", "t3|0.0|c").close()  # it died before the reply
        assert granted(record, "reported", "t4|0.0|d").conclude()

    leases = {one.note.keys[0]: one for one in record.of_dead(Child(0, life).kill())}
    assert {key: one.acquired_at for key, one in leases.items()} == {
        "silent": None,
        "held": 1.5,
        "released": 1.5,
        "reported": None,
    }
    assert [key for key, one in leases.items() if one.running] == ["held", "reported"]


def test_only_one_of_a_dying_child_and_its_parent_reports_an_end() -> None:
    record = SharedMemory()
    with open_pipe() as (done, write):

        def life() -> None:
            shared = granted(record, "k", "t|0.0|a")
            signal.signal(
                signal.SIGUSR1, lambda *_: os.write(write, b"01"[shared.conclude() :][:1])
            )

        child = Child(0, life)
        record.conclude(child.pid)
        os.kill(child.pid, signal.SIGUSR1)
        assert os.read(done, 1) == b"0"
        child.kill()


def test_the_parent_sees_that_another_child_frees_a_lease_at_any_time() -> None:
    record = SharedMemory()
    dead = Child(0, lambda: granted(record, "k", "t|0.0|a") and None).kill()
    [before] = record.of_dead(dead)
    assert not record.is_freeing(before)
    Child(1, lambda: record.freeing("t|0.0|a")).kill()
    assert record.is_freeing(before)
    [after] = record.of_dead(dead)
    assert after.acquired_at is None
    assert not after.concluded


def test_more_than_fits_is_left_to_the_ttl_and_what_fits_later_is_written() -> None:
    record = SharedMemory()

    def life() -> None:
        for number in range(40):
            record.note(("k" * 200,), f"t{number}", 60)
        for number in range(38):
            record.erase(f"t{number}")

    held = held_by_a_killed_child(record, 0, life)
    assert [one.token for one in held] == ["t38", "t39"]


def test_what_fitted_is_kept_when_one_more_does_not_fit() -> None:
    record = SharedMemory()

    def life() -> None:
        record.note(("a",), "a", 60)
        # The slots of the highest limit, with keys as long as they may be.
        for length in (5, 60, 400):
            wide = tuple(f"{'k' * length}#{number}" for number in range(1000))
            record.note(wide, f"wide-{length}", 60)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("a",), "a", 60)]


def test_a_child_killed_at_any_moment_leaves_a_record_that_can_be_read() -> None:
    record = SharedMemory()

    def life() -> None:
        if os.fork() == 0:
            # The grandchild keeps the index and writes until it dies.
            sys.setswitchinterval(1)
            os.write(pid_pipe[1], os.getpid().to_bytes(8, "little"))
            while True:
                record.note(("key" * 30,), "t|0.0|n", 60)
                record.erase("t|0.0|n")

    whole = [LeaseNote(("key" * 30,), "t|0.0|n", 60)]
    with open_pipe() as pid_pipe:
        for _ in range(20):
            child = Child(0, life)
            grandchild = int.from_bytes(os.read(pid_pipe[0], 8), "little")
            os.kill(grandchild, signal.SIGKILL)
            child.kill()
            assert notes_of_dead(record, grandchild) in ([], whole)
            record.empty(grandchild)


def test_threads_that_note_at_once_do_not_fail() -> None:
    import threading

    record = SharedMemory()

    def life() -> None:
        failures: list[BaseException] = []
        sys.setswitchinterval(1e-6)

        def body(name: str) -> None:
            try:
                for number in range(2000):
                    record.note((name,), f"{name}{number % 7}", 60)
                    record.erase(f"{name}{number % 7}")
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=body, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        record.note(("last",), "last", 60)

    assert held_by_a_killed_child(record, 0, life) == [LeaseNote(("last",), "last", 60)]


def test_the_largest_numbers_fit_into_their_parts() -> None:
    largest, latest = 2**63 - 1, 1e300
    owner = (2**31 - 1, largest)
    assert len(shared_memory.sealed(owner)) <= shared_memory._OWNER_BYTES
    for stamp in (largest, -largest):
        childs = (latest, stamp, latest, latest, True)
        assert len(shared_memory.sealed(childs)) <= shared_memory._CHILDS_BYTES
        assert len(shared_memory.sealed((stamp, latest))) <= shared_memory._PARENTS_BYTES
