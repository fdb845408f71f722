"""A driver of recorded or scripted GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvml.fake import FakeNvml


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(tmp_path)
    fake.install(monkeypatch)
    return fake
