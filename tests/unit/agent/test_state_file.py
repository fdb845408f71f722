"""The small files of what has to survive a restart, on a disk that is full for a while."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch_agent.state_file import StateFile


class Number(msgspec.Struct):
    value: int = 0


def test_a_full_disk_is_logged_at_its_begin_and_its_end_and_then_all_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    file = StateFile(path, Number, "numbers")
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(Path, "write_bytes", full)
        for file.state.value in (1, 2, 3):
            file.save()
    file.save()  # nothing has changed since the last try
    assert StateFile(path, Number, "numbers").state.value == 3
    file.state.value = 4
    file.save()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: the state of numbers cannot be written: No space left on device; trying again",
        f"{path}: the state of numbers is written again",
    ]
