"""What is reported where nothing can be sampled."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwatch.errors import ConfigError, GpuwatchError, MissingExtra
from gpuwatch.tools.stacks import spy
from gpuwatch.tools.stacks.spy import Target, check_readable, find_py_spy, take


def test_without_py_spy_the_pip_line_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"pip install 'gpuwatch-training\[stacks\]'"):
        find_py_spy()
    (tmp_path / "py-spy").touch(mode=0o755)
    assert find_py_spy() == tmp_path / "py-spy"


def test_where_it_is_not_permitted_the_remedy_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/mem").write_text("")
    check_readable(7, tmp_path)

    def refuse(path: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(GpuwatchError, match="pid 7 may not be read") as output:
        check_readable(7, tmp_path)
    for remedy in ("SYS_PTRACE", "sudo", "kernel.yama.ptrace_scope=0"):
        assert remedy in str(output.value)


def test_a_process_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GpuwatchError, match="pid 7 is gone"):
        check_readable(7, tmp_path)


def test_a_place_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a folder that you may write to"):
        take([Target(0, os.getpid(), tmp_path / "file/graph.json")], 1.0, 10)


FRAMES = [{"name": "wait_for_peer", "file": "/home/alice/hang.py", "line": 4}]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Without py-spy: the pids that answer."""
    found: set[int] = set()

    def ask(pid: int, **wanted: Any) -> bytes:
        if pid not in found:
            raise GpuwatchError(f"pid {pid} does not answer")
        profile = {"name": f'Process {pid} Thread 140 "MainThread"', "samples": [[0]] * 10}
        return msgspec.json.encode({"shared": {"frames": FRAMES}, "profiles": [profile]})

    def none() -> Path:
        raise MissingExtra("py-spy", "stacks")

    monkeypatch.setattr(spy, "ask", ask)
    monkeypatch.setattr(spy, "find_py_spy", none)
    return found


def test_one_rank_that_does_not_answer_costs_no_other_rank_s_stacks(answers: set[int], tmp_path: Path) -> None:
    answers |= {1, 3}
    stacks = take([Target(rank, rank + 1, tmp_path / f"rank{rank}.json") for rank in range(3)], 1.0, 10)
    shown = {each.rank: each.hottest for each in stacks.processes}
    assert shown[0] == shown[2] == "hang.py:4 wait_for_peer: 100% of samples"
    assert shown[1] == "not sampled: pid 2 does not answer"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank0.json", "rank2.json"], "no empty flame graph"


def test_where_none_answers_it_is_an_error_and_no_file_stays(answers: set[int], tmp_path: Path) -> None:
    with pytest.raises(GpuwatchError, match="pid 1 does not answer"):
        take([Target(rank, rank + 1, tmp_path / f"rank{rank}.json") for rank in range(2)], 1.0, 10)
    assert list(tmp_path.iterdir()) == []


def test_with_py_spy_a_rank_that_has_ended_costs_no_other_rank_s_stacks(
    answers: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no /proc/PID/mem of it any more."""
    program = tmp_path / "py-spy"
    profile = {"name": 'Process 1 Thread 1 "python"', "samples": [[0]] * 10}
    text = msgspec.json.encode({"shared": {"frames": FRAMES}, "profiles": [profile]}).decode()
    program.write_text(f"#!/bin/sh\nfor last; do :; done\ncat > \"$last\" <<'END'\n{text}\nEND\n")
    program.chmod(0o755)

    def check(pid: int, *_: Any) -> None:
        if pid != 1:
            raise GpuwatchError(f"pid {pid} is gone: stacks can be taken only while it runs")

    monkeypatch.setattr(spy, "find_py_spy", lambda: program)
    monkeypatch.setattr(spy, "check_readable", check)
    graphs = tmp_path / "graphs"
    stacks = take([Target(rank, rank + 1, graphs / f"rank{rank}.json") for rank in range(2)], 1.0, 10)
    assert stacks.processes[0].hottest == "hang.py:4 wait_for_peer: 100% of samples"
    assert [each.name for each in graphs.iterdir()] == ["rank0.json"]
