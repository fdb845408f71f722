"""Small readers of /proc, on files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host import proc as procfs


def test_what_a_process_has_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    rollup = tmp_path / "7" / "smaps_rollup"
    rollup.write_text("Rss: 900 kB\nShared_Dirty: 500 kB\nPrivate_Clean: 100 kB\nPrivate_Dirty: 300 kB\n")
    assert procfs.private_bytes(7, tmp_path) == 400 << 10
    rollup.write_text("Rss: 900 kB\n")
    with pytest.raises(NoData):
        procfs.private_bytes(7, tmp_path)
    with pytest.raises(NoData):
        procfs.private_bytes(8, tmp_path)


def test_memory_that_can_be_had(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\n")
    assert procfs.memory_bytes(tmp_path)["MemAvailable"] == 3000 << 10


def test_cpu_time_without_its_idle_part_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  30 0 10 50 10\ncpu0 30 0 10 50 10\n")
    busy_s, total_s = procfs.cpu_times_s(tmp_path)
    assert busy_s / total_s == pytest.approx(0.4)
    (tmp_path / "stat").write_text("cpu  30 0 10\n")
    with pytest.raises(NoData):
        procfs.cpu_times_s(tmp_path)


@pytest.mark.parametrize(("listed", "cores"), [("0-15", 16), ("3", 1), ("0-1,4,6-7", 5)])
def test_cores_that_a_process_may_use(listed: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(f"Name: python\nCpus_allowed_list:\t{listed}\nNSpid: 7\n")
    assert len(procfs.allowed_cores(7, tmp_path)) == cores


def test_time_without_a_core(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("5000000000 1500000000 99\n")
    assert procfs.run_queue_s(7, tmp_path) == 1.5
    assert procfs.by_pid(procfs.run_queue_s, [7, 8], tmp_path) == {7: 1.5}


def test_a_file_that_the_kernel_gives_in_pieces_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whole lines as fit into a page: the last piece alone may be short."""
    reads, given = [], [b"a" * 4090, b"b" * 4000, b"c" * 30]

    def read(file: int, most: int) -> bytes:
        reads.append(file)
        return given.pop(0)

    monkeypatch.setattr(procfs.os, "read", read)
    assert procfs.text_in("/proc/self/stat") == "a" * 4090 + "b" * 4000 + "c" * 30
    assert len(reads) == 3  # a short piece is the last one: no read finds the end
    given = [b"d" * 4096, b""]
    assert procfs.text_in("/proc/self/stat") == "d" * 4096
