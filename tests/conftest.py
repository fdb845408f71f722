"""What a test leaves behind is taken away: an open `Watch` would go on into the next one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from gpuwatch import this_process

# A shell gives SIGINT ignored to what it starts in the background, and so to the programs that tests press Ctrl-C in.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_open_watch() -> Iterator[None]:
    yield
    for watch in list(this_process.open_watches):
        watch._verdicts._quiet = True
        watch.close()
    this_process.open_watches.clear()
