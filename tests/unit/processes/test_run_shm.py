"""The /dev/shm of runs: what is read of each, and what a file system that hangs holds up."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuwatch_agent.processes as processes
from gpuwatch.errors import NoData
from gpuwatch_agent.exporter import shm_samples
from gpuwatch_agent.processes import Shm, _ShmReader


def make(tmp_path: Path, *pids: int) -> _ShmReader:
    for pid in pids:
        (tmp_path / f"{pid}/root/dev/shm").mkdir(parents=True)
    return _ShmReader(tmp_path, tmp_path)


def until(reader: _ShmReader, pids: set[int], wanted: set[int], within_s: float = 60) -> float:
    """Tick until these are known; return the longest tick."""
    longest_s, end_s = 0.0, time.monotonic() + within_s
    while reader.known.keys() != wanted:
        assert time.monotonic() < end_s, reader.known
        begin_s = time.monotonic()
        reader.update(pids)
        longest_s = max(longest_s, time.monotonic() - begin_s)
    return longest_s


def test_size_and_use_of_each_and_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shm_bytes(path: Path) -> tuple[int, int]:
        if "/12/" in str(path):
            raise NoData("no size limit")
        return 64, 16

    monkeypatch.setattr(processes.proc, "shm_bytes", shm_bytes)
    reader = make(tmp_path, 11, 12)
    until(reader, {11, 12, 13}, {11})
    assert reader.known == {11: Shm(64, 16, True)}
    until(reader, set(), set())


def test_one_that_hangs_delays_no_tick_and_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def shm_bytes(path: Path) -> tuple[int, int]:
        if "/12/" in str(path):
            go_on.wait(60)
        return 64, 16

    monkeypatch.setattr(processes.proc, "shm_bytes", shm_bytes)
    monkeypatch.setattr(processes, "SHM_DEADLINE_S", 0.2)
    reader = make(tmp_path, 11, 12, 13)
    reader._thread._deadline_s = 60  # a reader that gets no core does not hang
    try:
        with caplog.at_level(logging.WARNING):
            until(reader, {11}, {11})
            reader._thread._deadline_s = 0.2
            until(reader, {11, 12}, set())  # until it is given up on, and not longer than the deadline
            reader._thread._deadline_s = 60
            longest_s = until(reader, {11, 12, 13}, {11, 13})
        assert longest_s < 30
        assert [record.getMessage() for record in caplog.records] == [
            "process 12: statvfs of its /dev/shm timed out after 0.2 s; it is not measured"
        ]
    finally:
        go_on.set()


def test_the_node_s_own_is_looked_at_every_tenth_time_and_a_container_s_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reads, real = {11: "node", 12: "container"}, Counter[int](), os.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        pid = str(path).removeprefix(f"{tmp_path}/").partition("/root/")[0]
        found = real(path, **options)
        if not pid.isdigit():
            return found
        reads[int(pid)] += 1
        return os.stat_result((*found[:2], found[2] + (seen[int(pid)] == "container"), *found[3:]))

    monkeypatch.setattr(processes.proc, "shm_bytes", lambda path: (64, 16))
    monkeypatch.setattr(processes.os, "stat", stat)
    reader = make(tmp_path, 11, 12)
    until(reader, {11, 12}, {11, 12})
    assert reader.known == {11: Shm(64, 16, True), 12: Shm(64, 16, False)}
    reader._ticks = 0
    reads.clear()
    seen[11] = "container"  # it was moved
    for _ in range(9):
        reader.update({11, 12})
    assert reads == {12: 9} and reader.known[11].is_hosts
    reader.update({11, 12})
    assert reads == {11: 1, 12: 10} and not reader.known[11].is_hosts


def test_a_run_has_one_series_of_its_fullest_rank_and_the_node_s_stays_its_own() -> None:
    """The same series twice: Prometheus would keep the first, and miss the full one."""
    known = {11: Shm(64, 2, False), 12: Shm(32, 31, False), 13: Shm(64, 40, False), 14: Shm(0, 0, False)}
    known |= {15: Shm(16, 4, False), 16: Shm(99, 98, True)}
    table: Any = SimpleNamespace(host_pid=lambda hello: hello, shm=known.get)
    ranks = [("train", 11), ("train", 12), ("train", 13), ("empty", 14), ("host", 15), ("train", 16), ("train", None)]
    runs: list[Any] = [SimpleNamespace(run=run, live_hello=pid) for run, pid in ranks]
    assert [(each.metric, each.labels, each.value) for each in shm_samples(runs, table)] == [
        ("gpuwatch_shm_size_bytes", ("train",), 32), ("gpuwatch_shm_used_bytes", ("train",), 31),
        ("gpuwatch_shm_size_bytes", ("empty",), 0), ("gpuwatch_shm_used_bytes", ("empty",), 0),
        ("gpuwatch_shm_size_bytes", ("run host",), 16), ("gpuwatch_shm_used_bytes", ("run host",), 4),
    ]  # fmt: skip
