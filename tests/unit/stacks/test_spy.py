"""What is reported where nothing can be sampled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuwatch.errors import ConfigError, GpuwatchError, MissingExtra
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
