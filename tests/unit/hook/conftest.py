"""A Watch on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, fake_watch


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = fake_watch(clock, monkeypatch)
    yield watch
    watch.close()
