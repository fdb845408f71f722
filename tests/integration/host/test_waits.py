"""What a real process is blocked on: pipes and sockets are distinguished behind the same system call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuwatch.host import blocked as waits
from gpuwatch.host.proc import stat
from tests.servers import wait_for

_POLL = """
import os, select, socket, sys
pair = socket.socketpair()
reader, writer = os.pipe()
poll = select.poll()
for each in {"pipe": [reader], "socket": [pair[0]], "both": [reader, pair[0]]}[sys.argv[1]]:
    poll.register(each, select.POLLIN)
poll.poll(60_000)
"""


@pytest.mark.parametrize(("polled", "what"), [("pipe", "queue"), ("socket", "network"), ("both", "network")])
def test_a_poll_of_pipes_is_a_queue_s_and_one_of_a_socket_the_network_s(polled: str, what: str) -> None:
    """Found by the diagnosis benchmark: idle loader workers were reported as waiting for the network."""
    with subprocess.Popen([sys.executable, "-c", _POLL, polled]) as process:

        def now() -> str:
            return waits.blocked_on(process.pid, stat(process.pid).state)

        try:
            wait_for(f"it is blocked on: {what}", lambda: now() == what, 30, 0.02)
            for _ in range(50):
                assert now() == what
        finally:
            process.kill()
