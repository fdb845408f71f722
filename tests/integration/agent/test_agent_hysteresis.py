"""A finding of a real run whose starvation comes and goes.

It begins once that has lasted, ends once it has been gone for a while, and does not flap.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.agent_process import Agent
from tests.servers import wait_for

ACTIVE = ("gpuwatch_finding_active", "tidal", "input_unexplained")
TIME = ("gpuwatch_sample_timestamp_seconds",)
_TIDAL = """
import signal, time
import gpuwatch

starved = [True]
signal.signal(signal.SIGUSR1, lambda number, frame: starved.__setitem__(0, not starved[0]))

class Batch:
    shape, nbytes = (8,), 64

def batches():
    while True:
        time.sleep(0.04 * starved[0])
        yield Batch()

for _ in gpuwatch.watch(batches()):
    time.sleep(0.004)
"""


def test_it_begins_after_three_seconds_and_ends_after_ten(tmp_path: Path) -> None:
    config = tmp_path / "gpuwatch.toml"
    config.write_text("[thresholds]\ninput_share = 0.5\n")  # the last minute's share falls below it in seconds
    with Agent(tmp_path, "--config", str(config)) as agent:
        environment = {
            **os.environ,
            "GPUWATCH_RUN": "tidal",
            "GPUWATCH_ENDPOINT": agent.endpoint,
            "GPUWATCH_QUIET": "1",
        }
        process = subprocess.Popen([sys.executable, "-c", _TIDAL], env=environment)
        pages: list[tuple[float, float | None]] = []

        def is_active(wanted: bool) -> bool:
            page = agent.metrics()
            pages.append((page[TIME], page.get(ACTIVE)))
            return (pages[-1][1] == 1.0) is wanted

        def of_waits(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [each for each in findings if each["cause"] == "input_unexplained"]  # a busy machine may add others

        try:
            wait_for("the finding", lambda: is_active(True), 30, 0.2)
            begun_s = pages[-1][0]
            (finding,) = of_waits((agent.run("tidal") or {})["findings"])
            process.send_signal(signal.SIGUSR1)
            wait_for("its end", lambda: is_active(False), 60, 0.2)
            ended_s = pages[-1][0]
            for _ in range(10):
                assert is_active(False)
                time.sleep(0.1)
            assert of_waits((agent.run("tidal") or {})["findings"]) == []
            (past,) = of_waits(agent.get("/api/v1/runs/tidal/findings")["findings"])
        finally:
            process.kill()
            process.wait(10)
    assert past["cause"] == finding["cause"] == "input_unexplained" and past["since_s"] == finding["since_s"]
    assert begun_s - past["since_s"] > 2.99
    assert ended_s - past["seen_s"] > 9.99 and past["seen_s"] > past["since_s"]
    reported = [value for _, value in pages if value is not None]
    assert reported == [1.0] * reported.count(1.0) + [0.0] * reported.count(0.0), "it came and went once"
