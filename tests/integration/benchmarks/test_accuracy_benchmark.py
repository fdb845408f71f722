"""A short run of `python -m benchmarks.accuracy` on the torch device without hardware.

The bound is 2 points, as in the full table.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from benchmarks import async_device
from benchmarks.accuracy.measure import BOUND_CLOSURE, BOUND_POINTS, BUDGET, in_a_process
from benchmarks.accuracy.page import shares
from tests.programs import ROOT
from tests.servers import require

SECONDS = 1.5
ROWS = [
    ("constant wait", "host"),
    ("constant wait", "device"),
    ("hidden wait", "device"),
    ("partly hidden wait", "device"),
    ("burst every 4th", "device"),
    ("two optimizers", "device"),
    ("real network", "device"),
    ("slow first batch", "device"),
    ("evaluation, declared", "host"),
    ("host work in the loop", "device"),
    ("host work between steps", "host"),
    ("pageable copies", "device"),
    ("`.item()` every step", "device"),
    ("gradient accumulation", "device"),
    ("weights averaged", "device"),
    ("metrics after the step", "device"),
    ("late labels", "device"),
    ("side-stream prefetcher", "device"),
    ("prefetch by hand", "device"),
    ("steps by hand", "device"),
    ("host work between steps", "device"),
    ("optimizer in backward", "device"),
    ("early break", "host"),
    ("checkpoint and other", "host"),
    ("two nested loops", "host"),
    ("two nested loops", "device"),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require(*async_device.COMPILERS)
    async_device.build()


@pytest.mark.alone
@pytest.mark.parametrize(("name", "ledger"), ROWS)
def test_injected_time_is_reported_within_two_points(name: str, ledger: str) -> None:
    # A pause of the machine between two clocks is no error of the ledger: it does not come each time.
    for more in (1, 2, 4):
        row = in_a_process(name, ledger, more * SECONDS)
        if row.holds:
            break
    state, error = row.worst
    assert row.timeline == ledger
    assert abs(error) <= BOUND_POINTS, f"{state}: {shares(row.truth)} was {shares(row.reported)}"
    assert sum(row.reported.values()) == pytest.approx(100, abs=BOUND_CLOSURE)
    assert row.steps > 0


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "copy_s"), [("pageable copies", 0.004), ("pinned copies, overlapped", 0.004), ("real network", 0.0)]
)
def test_events_around_launches_give_the_truth_that_a_device_gives_itself(name: str, copy_s: float) -> None:
    """The way in which a GPU's truth is measured, tried on the device that knows its own."""

    def both() -> tuple[dict[str, int], dict[str, int], int]:
        from benchmarks.accuracy.lab import OPERATION_S, Lab, TimedDevice
        from benchmarks.accuracy.scenarios import named

        device = TimedDevice(async_device.NAME, async_device.launch)
        async_device.settings(op_s=OPERATION_S, to_device_s=copy_s)
        lab = Lab(0.5, device, by_device=True, budget=BUDGET)
        named(name).run(lab)
        lab.finish()
        return lab.true_ns(), lab.truth.device_ns(async_device.spans()), lab.truth.wall_ns

    by_events, by_itself, wall_ns = async_device.in_a_fork(both)
    assert by_itself["compute"] > 0.1 * wall_ns
    for state in {*by_events, *by_itself}:
        assert by_events.get(state, 0) == pytest.approx(by_itself.get(state, 0), abs=0.01 * wall_ns), state


def test_the_page_has_every_scenario_by_both_ledgers_and_the_command_runs_one() -> None:
    page = (ROOT / "docs" / "evidence" / "accuracy.md").read_text()
    command = [sys.executable, "-m", "benchmarks.accuracy", "--only", "constant wait", "--seconds", "0.5"]
    command += ["--ledger", "host"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT)
    assert "constant wait" in done.stdout and "rows hold" in done.stderr
    host, device = page.split("## Host clock")[1].split("## Real torch device")
    scenarios = (ROOT / "benchmarks" / "accuracy" / "scenarios.py").read_text().count("\n    Scenario(")
    assert host.count("\n| ") - 1 == device.split("\n## ")[0].count("\n| ") - 1 == scenarios
    assert "python -m benchmarks.accuracy --write" in page
