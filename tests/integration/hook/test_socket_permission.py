"""A user who may not write to the agent's socket: training goes on, and what to ask for is logged once."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TRAINING = """
import os, sys, time, gpuwatch
from gpuwatch.hook.publisher import import_diagnosis
import_diagnosis()  # the user may not be allowed to read the test's Python
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
with gpuwatch.Watch(quiet=True) as w:
    for _ in w.steps(range(8)):
        time.sleep(0.3)
print(w.report().steps)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="training as another user takes root")
def test_user_without_the_sockets_group_reads_once_what_to_ask_for() -> None:
    with tempfile.TemporaryDirectory(prefix="gpuwatch-") as folder, socket.socket(socket.AF_UNIX) as agent:
        Path(folder).chmod(0o755)
        path = Path(folder) / "hook.sock"
        agent.bind(str(path))
        agent.listen()
        path.chmod(0o660)
        user = str(pwd.getpwnam("nobody").pw_uid)
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, user],
            env={**os.environ, "GPUWATCH_ENDPOINT": f"ipc://{path}", "HOME": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    assert done.stderr.count("permission denied") == 1
    assert f"nothing is sent to an agent: {path}: permission denied; ask for the group gpuwatch" in done.stderr
