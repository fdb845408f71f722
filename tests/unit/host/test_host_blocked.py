"""What a process is blocked on, from files like the kernel's."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host import blocked as waits
from gpuwatch.host import proc
from gpuwatch.host.proc import parse_disks, received_bytes

X86 = waits._by_number("x86_64")


@pytest.mark.parametrize(
    ("state", "syscall", "what"),
    [
        ("R", "running", "cpu"),
        ("D", "", "disk"),
        ("S", "45 0x5 0x0", "network"),
        ("S", "7 0x7ffe 0x1", "network"),
        ("S", "202 0x7f 0x189", "lock"),
        ("S", "73 0x4 0x2", "lock"),
        ("S", "230 0x1 0x0", "sleep"),
        ("S", "0 0x3 0x0", "other"),
        ("S", "-1 0x7ffe", "other"),
        ("S", "running", "cpu"),  # it was woken after its state was read
        ("S", "", "other"),
    ],
)
def test_a_system_call_says_what_is_waited_for(state: str, syscall: str, what: str) -> None:
    assert waits.classify(state, syscall, X86) == what


def test_a_machine_without_a_table_says_nothing_of_sleepers() -> None:
    assert waits.classify("S", "202 0x7f", waits._by_number("riscv64")) == "other"


def test_files_of_a_process(tmp_path: Path) -> None:
    place = tmp_path / "11"
    place.mkdir()
    assert waits.blocked_on(11, "D", tmp_path) == "disk"
    assert waits.blocked_on(11, "S", tmp_path) == "other"  # its system call may not be read
    (place / "syscall").write_text("202 0x7f 0x0")
    assert waits.blocked_on(11, "S", tmp_path) == ("lock" if platform.machine() == "x86_64" else "other")


def test_a_wait_for_a_thread_of_its_own_is_what_that_waits_for(tmp_path: Path) -> None:
    """A pool of threads that download, in each worker: "wait for a lock … more workers will not help"."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers are x86-64's")
    for thread, call in ((11, "202 0x7f"), (12, "202 0x7f"), (13, "45 0x5 0x0")):
        place = tmp_path / f"11/task/{thread}"
        place.mkdir(parents=True)
        (place / "syscall").write_text(call)
    (tmp_path / "11/syscall").write_text("202 0x7f 0x0")
    assert waits.blocked_on(11, "S", tmp_path) == "network"
    (place / "syscall").write_text("202 0x7f 0x0")
    assert waits.blocked_on(11, "S", tmp_path) == "lock"


def test_shares_of_waits_need_enough_samples(tmp_path: Path) -> None:
    workers = waits.Workers(window_s=10.0, keep=8)
    (tmp_path / "7").mkdir()
    for at, state in enumerate("DDDDDDRR"):
        assert workers.waits() is None
        (tmp_path / "7/stat").write_text(f"7 (py) th) {state} {'0 ' * 10}{at * proc.TICKS_PER_S} {'0 ' * 10}\n")
        assert workers.sample(2.0 * at, proc.by_pid(proc.stat, [7, 8], tmp_path), tmp_path) == {7: float(at)}
    found = workers.waits()
    assert found is not None
    assert (workers.ratios(), workers.ratios(busy=True), workers.private_bytes) == ((0.5,), None, None)
    (tmp_path / "7/stat").unlink()
    workers.sample(16.0, {}, tmp_path)
    assert workers.ratios() == (0.5,)  # as it was last
    assert (found["disk"], found["cpu"], found["lock"], sum(found.values())) == (0.75, 0.25, 0.0, 1.0)


def test_bytes_and_disks_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "self/net").mkdir(parents=True)
    head = "Inter-|   Receive\n face |bytes\n"
    (tmp_path / "self/net/dev").write_text(f"{head}    lo: 100 1 0 0 0 0 0 0 100 1\n  eth0:4000 4 0 0 0 0 0 0 50 1\n")
    assert received_bytes("self", tmp_path) == 4100
    line = "{} 0 {} 10 0 2048 5 0 0 0 0 0 1500 0\n"
    names = ("sda", "sda1", "loop0", "nvme0n1", "nvme0n1p2", "dm-0", "vda")
    (tmp_path / "diskstats").write_text("".join(line.format(8, name) for name in names))
    assert proc.read(tmp_path / "diskstats", parse_disks) == {
        name: (2048 * 512, 0, 1.5) for name in ("sda", "nvme0n1", "vda")
    }


def test_what_is_not_there_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData):
        received_bytes("self", tmp_path)
    with pytest.raises(NoData):
        proc.read(tmp_path / "diskstats", parse_disks)
