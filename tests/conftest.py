"""What a test leaves behind is taken away: an open `Watch` would go on into the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuwatch import hook


@pytest.fixture(autouse=True)
def no_open_watch() -> Iterator[None]:
    yield
    for watch in list(hook._open_watches):
        watch._quiet = True
        watch.close()
    hook._open_watches.clear()
