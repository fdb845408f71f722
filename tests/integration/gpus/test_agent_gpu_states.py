"""Every state of a GPU's ledger through a real agent: scripted NVML, real hooks, one process that speaks as a hook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.integration.agent_process import Agent
from tests.integration.gpus.test_agent_gpus import Ledgers
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.programs import ROOT
from tests.servers import wait_for

ALL_STATES = """
import time, gpuwatch, gpuwatch.ledger.timeline
gpuwatch.ledger.timeline.STALL_FLOOR_NS = 1_000_000_000
gpuwatch.ledger.timeline.STALL_MEDIANS = 2

def batches():
    for _ in range(5):
        time.sleep(0.1)
        yield 0

with gpuwatch.Watch(quiet=True) as w:
    time.sleep(0.4)
    for _ in w.steps(batches()):
        with w.transfer():
            time.sleep(0.1)
        time.sleep(0.1)
    for phase in ("compile", "eval", "checkpoint", "upload"):
        with w.phase(phase):
            time.sleep(0.4)
    for number, _ in enumerate(w.steps(batches())):
        time.sleep(4 if number == 1 else 0.05)
    while True:
        with w.step():
            time.sleep(0.05)
"""
"""A real hook goes through nine states; 4 s in one step are a stall, as 30 s would be."""

FINISHED = """
import time, gpuwatch, gpuwatch.ledger.timeline
gpuwatch.ledger.timeline.STALL_FLOOR_NS = 1_000_000_000

w = gpuwatch.Watch(quiet=True)
for _ in w.steps(range(20)):
    time.sleep(0.02)
time.sleep(600)
"""
"""A notebook whose loop has ended: 1 s without a step is long, as 30 s would be."""

HOOK = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from gpuwatch import wire
from gpuwatch.hook.identity import identify
from gpuwatch.wire.sockets import ZmqSender
from tests.unit.agent.hooks import FakeHook
import msgspec

me = identify()
hook = FakeHook(time.monotonic_ns(), run=sys.argv[3], sender=sys.argv[3], pid=os.getpid(), boot_id=me.boot_id,
                wall_offset_ns=time.time_ns() - time.monotonic_ns())
sender = ZmqSender(sys.argv[1])
states = sys.argv[4].split(",")
time.sleep(0.3)
for turn in range(10_000):
    state = states[turn % len(states)]
    hook.spend(state, time.monotonic_ns() - hook.at_ns)
    sender.send(wire.encode(hook.hello(start_ticks=me.process_start_ticks)))
    sender.send(wire.encode(hook.message(state)))
    time.sleep(0.2)
"""


def gpu(number: int, *pids: int, busy: int = 90, **more: object) -> FakeGpu:
    held = tuple((pid, 1 << 30) for pid in pids)
    return FakeGpu(uuid=f"GPU-{number}", utilization_percent=busy, processes=held, **more)  # type: ignore[arg-type]


def speak(agent: Agent, run: str, *states: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", HOOK, agent.endpoint, str(ROOT), run, ",".join(states)])


def test_every_state_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(n, busy=0) for n in range(6)])
    with Agent(tmp_path, environment=nvml.environment()) as agent:
        monkeypatch.setenv("GPUWATCH_ENDPOINT", agent.endpoint)
        monkeypatch.setenv("GPUWATCH_RUN", "all-states")
        hook = subprocess.Popen([sys.executable, "-c", ALL_STATES])
        without_hook = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        waits = speak(agent, "waits", "host_wait", "comm_wait")
        one, two = speak(agent, "one", "input_wait", "compute"), speak(agent, "two", "input_wait")
        processes = [hook, without_hook, waits, one, two]
        try:
            on = [(hook.pid,), (waits.pid,), (without_hook.pid,), (), (without_hook.pid,), (one.pid, two.pid)]
            busy = [90, 90, 90, 0, 0, 90]
            nvml.write([gpu(n, *pids, busy=busy[n]) for n, pids in enumerate(on)])
            wanted = {
                0: {
                    "startup",
                    "compile",
                    "input_wait",
                    "transfer",
                    "compute",
                    "eval",
                    "checkpoint",
                    "other",
                    "stalled",
                },
                1: {"host_wait", "comm_wait"},
                2: {"busy_unattributed"},
                3: {"unallocated"},
                4: {"held_idle"},
                5: {"input_wait", "compute"},
            }

            ledgers = Ledgers(agent)  # each look checks the watermark against the sum of states
            wait_for("every state", lambda: all(wanted[n] <= ledgers.look(n).keys() for n in wanted), 40, 0.3)
            assert 1.5 < ledgers.look(0)["stalled"] < 4.5
            assert ledgers.owner(5) == ("shared", "")

            def computes() -> bool:
                """Whether the one computes in every other fifth of a second, and the other one always waits."""
                both = ledgers.look(5)
                return 0.2 < both["compute"] / (both["compute"] + both["input_wait"]) < 0.8

            wait_for("a part of a shared GPU's time", computes, 60, 1)  # a pause of either is a part too
            nvml.write([gpu(n, *pids, busy=busy[n], lost=n == 4) for n, pids in enumerate(on)], load=1)
            wait_for("GPU 4 is unknown", lambda: ledgers.look(4).get("unknown"), 20, 0.3)
            before = ledgers.look(0)
            # the driver was reloaded as well: the others go on where they were
            wait_for("GPU 0 goes on", lambda: ledgers.look(0)["compute"] > before["compute"] + 1, 30, 0.3)
            assert [ledgers.state(n) for n in (2, 3)] == ["busy_unattributed", "unallocated"]
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


def test_a_finished_loop_in_a_process_that_lives_on_is_idle_and_not_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(tmp_path)
    with Agent(tmp_path, environment=nvml.environment()) as agent:
        monkeypatch.setenv("GPUWATCH_ENDPOINT", agent.endpoint)
        monkeypatch.setenv("GPUWATCH_RUN", "notebook")
        notebook = subprocess.Popen([sys.executable, "-c", FINISHED])
        try:
            nvml.write([gpu(0, notebook.pid, busy=0)])
            ledgers = Ledgers(agent)
            agent.wait_run("notebook", activity="idle")
            before = ledgers.look(0).get("held_idle", 0)
            wait_for("held_idle", lambda: ledgers.look(0).get("held_idle", 0) > before + 3, 40, 0.3)
            run = agent.wait_run("notebook")
            assert (run["activity"], run["states"].get("stalled", 0)) == ("idle", 0)
            assert run["states"]["other"] > 3
            assert ledgers.look(0).get("stalled", 0) == 0
            assert not {each["cause"] for each in run["findings"]} & {"stalled", "hung"}
        finally:
            notebook.kill()
            notebook.wait(10)


DECLARED = """
import time, gpuwatch

with gpuwatch.Watch(quiet=True, flops_per_step=2e13, peak_flops=1979e12) as w:
    for _ in w.steps(range(100_000)):
        time.sleep(0.05)
"""
"""4e14 operations a second, a fifth of the peak that a data sheet gives with sparsity."""


def test_mfu_is_estimated_and_a_declared_one_that_contradicts_it_is_found(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    facts = {"name": "NVIDIA H200", "clock_sm_mhz": 1830, "gpm": {pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 40.0}}
    nvml.write([FakeGpu(uuid="GPU-0", **facts)])
    with Agent(tmp_path, environment=nvml.environment()) as agent:
        environment = {**os.environ, "GPUWATCH_RUN": "declared", "GPUWATCH_ENDPOINT": agent.endpoint}
        with subprocess.Popen([sys.executable, "-c", DECLARED], env=environment) as training:
            try:
                nvml.write([FakeGpu(uuid="GPU-0", processes=((training.pid, 1 << 30),), **facts)])

                def look() -> list[str]:
                    found = agent.wait_run("declared")["findings"]
                    return [each["title"] for each in found if each["cause"] == "mfu_mismatch"]

                assert wait_for("it is found", look, 100, 0.5)[0].endswith("about 40%")
                recent = agent.wait_run("declared")["recent"]
                assert recent["mfu_estimated_ratio"] == pytest.approx(0.4, rel=0.01)
                assert 0.1 < recent["mfu_ratio"] < 0.21
                page = agent.metrics()
                assert page["gpuwatch_run_mfu_estimated_ratio", "declared", "0"] == recent["mfu_estimated_ratio"]
                assert page["gpuwatch_finding_active", "declared", "mfu_mismatch"] == 1
            finally:
                training.kill()
