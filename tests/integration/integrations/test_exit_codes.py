"""`gpuwatch run` leaves a program's end as it is: exit status, signal, output; also for multiprocessing's children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = """
import multiprocessing, os, signal, sys, torch

ENDS = {
    "returns": lambda: None,
    "exits": lambda: sys.exit(3),
    "exits with a text": lambda: sys.exit("no more data"),
    "raises": lambda: [][0],
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "os._exit": lambda: os._exit(5),
    "aborts": os.abort,
}

def train(end, has_loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(40, 4)
    for number, batch in enumerate(torch.utils.data.DataLoader(rows, batch_size=2) if has_loader else rows.split(2)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if number == 9:
            print("trained", flush=True)
            ENDS[end]()

if __name__ == "__main__":
    how, end, has_loader = sys.argv[1], sys.argv[2], sys.argv[3] == "loader"
    if how == "here":
        train(end, has_loader)
    else:
        if how == "fork":
            import torch._dynamo  # else each child's optimizer imports it, for a second and a half
        codes = []
        for end in sys.argv[2].split(","):
            child = multiprocessing.get_context(how).Process(target=train, args=(end, has_loader))
            child.start()
            child.join()
            codes.append(child.exitcode)
        print(codes)
        sys.exit(codes[1] + 4)
"""
CODES = {
    "returns": 0,
    "exits": 3,
    "exits with a text": 1,
    "raises": 1,
    "SIGTERM": -signal.SIGTERM,
    "SIGINT": -signal.SIGINT,
    "os._exit": 5,
    "aborts": -signal.SIGABRT,
}
TEXTS = {
    "exits with a text": "no more data\n",
    "raises": "IndexError: list index out of range\n",
    "SIGINT": "KeyboardInterrupt\n",
}


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program, under `gpuwatch run`, without an agent."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "gpuwatch", "run", "--", sys.executable, str(path), *arguments]
    environment = {**os.environ, "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(("end", "source"), [*zip(CODES, cycle(("loader", "none")), strict=False)])
def test_a_program_ends_as_without_gpuwatch(end: str, source: str, tmp_path: Path) -> None:
    done = run(tmp_path, "here", end, source)
    assert (done.returncode, done.stdout) == (CODES[end], "trained\n"), done.stderr
    assert TEXTS.get(end, "") in done.stderr and f"{os.sep}gpuwatch{os.sep}hook" not in done.stderr
    ends_itself = end in ("SIGTERM", "os._exit", "aborts")
    assert done.stderr.count("gpuwatch · train.py") == (not ends_itself), done.stderr


@pytest.mark.parametrize(
    ("how", "source", "ends"),
    [("fork", "loader", [*CODES]), ("spawn", "none", ["raises", "exits", "SIGINT", "aborts"])],
)
def test_processes_of_multiprocessing_end_as_without_gpuwatch(
    how: str, source: str, ends: list[str], tmp_path: Path
) -> None:
    """An interrupted one has exit status 1 there: multiprocessing prints the exception."""
    done = run(tmp_path, how, ",".join(ends), source)
    codes = [1 if end == "SIGINT" else CODES[end] for end in ends]
    assert done.returncode == 7 and done.stdout == "trained\n" * len(ends) + f"{codes}\n", done.stderr
    end_themselves = {"SIGTERM", "os._exit", "aborts"}
    assert done.stderr.count("gpuwatch · train.py") == len({*ends} - end_themselves), done.stderr
    assert "no training step was seen" not in done.stderr, "its children have trained"
