"""Cells of a real IPython shell: what is drawn below each; the time between two cells is no part of the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_NOTEBOOK = """
import json, sys, time
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.kernel = object()
cells = []

def publish(data, metadata=None, *, transient=None, update=False, **others):
    cells[-1].append((update, data["text/plain"]))

shell.display_pub.publish = publish

def run(text):
    cells.append([])
    shell.run_cell(text, store_history=True)

away_s = 0.0
def pause(seconds):
    global away_s
    begin = time.perf_counter()
    time.sleep(seconds)
    away_s += time.perf_counter() - begin

run("import gpuwatch, time; w = gpuwatch.Watch()")
pause(1)
run("for i in w.steps([0] * 40): time.sleep(0.01)")
pause(2)
run("for epoch in range(3):\\n  for i in w.steps([0] * 40): time.sleep(0.01)")
run("1 + 1")
run('''
for i in w.steps(range(1000)):
    time.sleep(0.01)
    if i == 9: raise KeyboardInterrupt
''')
pause(1)
run("for i in w.steps([0] * 40): time.sleep(0.01)")
run("get_ipython().run_cell('1'); time.sleep(0.1); report = w.report()")
report = shell.user_ns["report"]
found = {"states": report.states, "phases": report.phases, "steps": report.steps, "sentence": report.verdict.sentence}
print("FOUND " + json.dumps({"cells": cells, "away_s": away_s, **found}))
"""


def test_cells_are_drawn_in_place_and_the_time_between_them_is_excluded(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(_NOTEBOOK)
    environment = {**os.environ, "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock", "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    drawn = [[(update, text.split(" step")[0].split()[-1]) for update, text in cell] for cell in found["cells"]]
    assert drawn[0] == drawn[3] == drawn[6] == [], "a cell without training draws nothing"
    assert [cell[-1][1] for cell in (drawn[1], drawn[2], drawn[4], drawn[5])] == ["40", "160", "170", "210"]
    assert {"120", "160"} <= {count for _, count in drawn[2]}, "at the end of a pass, unless it was drawn just before"
    for cell in (drawn[1], drawn[2], drawn[4], drawn[5]):
        assert [update for update, _ in cell] == [False] + [True] * (len(cell) - 1), "in place"
    assert found["steps"] == 210
    between_s = found["phases"]["between cells"]
    assert found["away_s"] >= 4.0 and -0.05 <= between_s - found["away_s"] <= 1.5, found
    assert found["states"]["compute"] >= 2.1 and 0.1 <= found["states"]["other"] - between_s < 1.0, found
    assert "s between cells)" in found["sentence"], found
