"""The GPU ledger of a real agent: a scripted NVML, and real processes with and without a hook on its GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pynvml
import pytest

from gpuwatch.ledger.states import GPU_STATES
from tests.integration.agent_process import Agent, Trainer
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import wait_for

POLLED_S = 45
"""The agent asks for process lists every 10 s; on a busy machine a new process takes a while to be there at all."""


def gpu(number: int, *pids: int, busy: int = 0, **more: object) -> FakeGpu:
    processes = tuple((pid, 1 << 30) for pid in pids)
    return FakeGpu(uuid=f"GPU-{number}", utilization_percent=busy, processes=processes, **more)  # type: ignore[arg-type]


class Ledgers:
    """The GPUs' ledgers as they are served; every look checks what holds always."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._last: dict[tuple[str, ...], float] = {}
        self._starts: dict[str, float] = {}

    def look(self, number: int) -> dict[str, float]:
        """Return a GPU's seconds by state, those at 0 left out."""
        page = self.agent.metrics()
        counters = {key: value for key, value in page.items() if key[0] == "gpuwatch_gpu_seconds_total"}
        fallen = {key for key, value in self._last.items() if counters[key] < value}
        assert not fallen
        self._last = counters
        for uuid in {key[2] for key in counters}:
            states = {key[3]: value for key, value in counters.items() if key[2] == uuid}
            assert set(states) == set(GPU_STATES)
            (watermark_s,) = (
                v for k, v in page.items() if k[0].endswith("gpu_ledger_watermark_timestamp_seconds") and k[2] == uuid
            )
            start_s = watermark_s - sum(states.values())
            assert self._starts.setdefault(uuid, start_s) == pytest.approx(start_s, abs=0.05)
            assert sum(key[0] == "gpuwatch_gpu_owner_info" and key[2] == uuid for key in page) == 1
        return {key[3]: value for key, value in counters.items() if key[2] == f"GPU-{number}" and value}

    def state(self, number: int) -> str:
        status = self.agent.get("/api/v1/status")
        return next(each["state"] for each in status["gpus"] if each["uuid"] == f"GPU-{number}")

    def owner(self, number: int) -> tuple[str, ...]:
        """Return run, rank and job of a GPU's owner."""
        return next(
            key[3:5]
            for key in self.agent.metrics()
            if key[0] == "gpuwatch_gpu_owner_info" and key[2] == f"GPU-{number}"
        )


def test_gpu_seconds_follow_processes_hooks_and_losses(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    idler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    nvml.write([gpu(0), gpu(1, idler.pid), gpu(2)])
    agent = Agent(tmp_path, environment=nvml.environment())
    try:
        with agent:
            ledgers = Ledgers(agent)
            assert [ledgers.state(number) for number in range(3)] == ["unallocated", "held_idle", "unallocated"]
            assert ledgers.owner(1) == ("", "")
            wait_for("GPU 1 is idle", lambda: ledgers.look(1).get("held_idle"), 20)
            with (
                Trainer(agent, run="alone", data_s=0.02, compute_s=0.02) as alone,
                Trainer(agent, run="one", data_s=0.02, compute_s=0.02) as one,
                Trainer(agent, run="two", data_s=0.02, compute_s=0.02) as two,
            ):
                nvml.write([gpu(0, alone.pid, busy=90), gpu(1, idler.pid, busy=90), gpu(2, one.pid, two.pid, busy=90)])
                busy_s = time.time()
                wait_for("the processes are listed", lambda: ledgers.owner(0) == ("alone", "0"), POLLED_S, 0.3)
                assert ledgers.owner(2) == ("shared", "")
                without = ("gpuwatch_processes_without_hook",)
                wait_for("only the idler is without a hook", lambda: agent.metrics()[without] == 1, POLLED_S, 0.3)
                run = agent.wait_run("alone")
                seconds = ledgers.look(0)
                # from the run's begin on, although its process was listed seconds later
                assert set(seconds) <= {"unallocated", "busy_unattributed", "startup", "input_wait", "compute", "other"}
                without_hook_s = seconds.get("busy_unattributed", 0)  # busy before its hook was there
                assert without_hook_s < 2 + max(0.0, run["started_s"] - busy_s)
                trained_s = seconds["input_wait"] + seconds["compute"]
                before_s, after_s = (
                    each["states"]["input_wait"] + each["states"]["compute"] for each in (run, agent.wait_run("alone"))
                )
                assert before_s - 2.5 < trained_s < after_s + 2.5
                wait_for("GPU 1 is busy", lambda: ledgers.look(1).get("busy_unattributed", 0) > 3, 20)
                assert ledgers.look(1)["held_idle"] > 0

                agent.kill()
                time.sleep(1.5)
                agent.start()
                wait_for("the run is heard", lambda: ledgers.owner(0) == ("alone", "0"), 20, 0.1)

                def trained() -> float:
                    seconds = ledgers.look(0)
                    return seconds["input_wait"] + seconds["compute"]

                wait_for("it goes on", lambda: trained() > trained_s + 3, 20)
                again = ledgers.look(0)
                assert "unknown" not in again and again.get("busy_unattributed", 0) == without_hook_s

                nvml.write(
                    [gpu(0, alone.pid, busy=90), gpu(1, idler.pid, busy=90, lost=True), gpu(2, one.pid, busy=90)]
                )
                wait_for("GPU 1 is lost", lambda: ledgers.state(1) == "unknown", 20, 0.2)

                nvml.write([gpu(0, busy=0), gpu(1, idler.pid, busy=0), gpu(2, one.pid, busy=90)])
                alone.process.kill()
                alone.process.wait(10)
                # its process is gone before the driver is asked again, and before its run is given up
                wait_for("GPU 0 is free", lambda: ledgers.state(0) == "unallocated", 4, 0.2)
                assert ledgers.owner(0) == ("", "")
                wait_for("GPU 2 has one run", lambda: ledgers.owner(2) == ("one", "0"), POLLED_S, 0.3)
                wait_for("GPU 1 is back", lambda: ledgers.state(1) == "held_idle", POLLED_S, 0.3)
                assert ledgers.look(1)["unknown"] > 0
                both = ledgers.look(
                    2
                )  # shared for a while: what either run did, and the time before them that belongs to no run
                started_s = min((agent.run(each) or {})["started_s"] for each in ("one", "two"))
                assert both["compute"] > 3 and both.get("busy_unattributed", 0) < 2 + max(0.0, started_s - busy_s)
    finally:
        idler.kill()
        idler.wait(10)


def test_energy_of_a_real_run_by_state_is_what_the_counter_grew_by(tmp_path: Path) -> None:
    """Over a killed agent, a call that fails and a driver that is loaded again."""
    nvml = FakeNvml(tmp_path)
    counter_mj, refused = 10**9, {"nvmlDeviceGetTotalEnergyConsumption": pynvml.NVML_ERROR_NO_PERMISSION}

    def use(seconds: float, *pids: int, **more: object) -> None:
        nonlocal counter_mj
        for _ in range(round(seconds * 5)):
            counter_mj += 100_000  # 500 W
            nvml.write([gpu(0, *pids, busy=50, energy_mj=counter_mj, **more)])
            time.sleep(0.2)

    def served(agent: Agent) -> dict[str, float]:
        page = agent.metrics()
        return {key[3]: value for key, value in page.items() if key[0] == "gpuwatch_gpu_energy_joules_total"}

    nvml.write([gpu(0, energy_mj=counter_mj)])
    agent = Agent(tmp_path, environment=nvml.environment())
    with agent, Trainer(agent, run="warm", data_s=0.05, compute_s=0.05) as trainer:
        wait_for("the counter is read", lambda: served(agent), 5)
        use(0.2, trainer.pid)
        wait_for(
            "the run has the GPU", lambda: use(1, trainer.pid) or agent.wait_run("warm")["energy_joules"], POLLED_S
        )
        use(3, trainer.pid)
        agent.kill()
        use(2, trainer.pid)
        agent.start()
        use(2, trainer.pid)
        use(2, trainer.pid, errors=refused)
        use(2, trainer.pid)
        used_j = (counter_mj - 10**9) / 1000
        found = wait_for(
            "it is all booked", lambda: abs(sum(served(agent).values()) - used_j) < 1e-6 and served(agent), 5
        )
        assert set(found) == {"working", "waiting", "idle", "unknown"}
        assert found["working"] > 0.25 * used_j and found["waiting"] > 0.25 * used_j
        (shown,) = agent.get("/api/v1/status")["gpus"]
        assert sum(shown["energy_joules"].values()) == pytest.approx(used_j)
        kept = agent.get("/api/v1/ledger")["gpus"][0]["energy_joules"]
        assert sum(kept.values()) == pytest.approx(used_j, rel=0.2) and kept["compute"] > 1000
        of_run = agent.wait_run("warm")["energy_joules"]
        assert set(of_run) <= {"startup", "input_wait", "compute", "other", "unknown"}
        assert sum(of_run.values()) == pytest.approx(used_j, rel=0.3)
        counter_mj = 0  # a driver that was loaded again
        use(2, trainer.pid)
        again_j = used_j + counter_mj / 1000
        wait_for("it goes on", lambda: abs(sum(served(agent).values()) - again_j) < 1e-6, 5)
        nvml.write([gpu(0, trainer.pid, lost=True)])
        wait_for("it is lost", lambda: agent.metrics()["gpuwatch_gpus_seen",] == 0, 5)
        assert sum(served(agent).values()) == pytest.approx(again_j)


def test_restarted_agent_expects_a_gpu_that_is_lost(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(0, busy=0), gpu(1, busy=0)])
    with Agent(tmp_path, environment=nvml.environment()) as agent:
        wait_for("both are seen", lambda: agent.metrics().get(("gpuwatch_gpus_seen",)) == 2, 6, 0.1)
        Ledgers(agent).look(1)
        agent.kill()
        nvml.write([gpu(0, busy=0)])
        agent.start()
        wait_for("one is seen", lambda: agent.metrics().get(("gpuwatch_gpus_seen",)) == 1, 6, 0.1)
        assert agent.metrics()["gpuwatch_gpus_expected",] == 2


def test_wedged_driver_freezes_nothing(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(0, busy=0)])
    with Agent(tmp_path, environment=nvml.environment()) as agent, Trainer(agent, run="goes-on") as trainer:
        ledgers = Ledgers(agent)
        agent.wait_run(trainer.run, activity="data_wait")
        nvml.write([gpu(0, busy=0, hangs_s={"nvmlDeviceGetUtilizationRates": 600})])
        failed = ("gpuwatch_collector_failed", "gpu")
        wait_for("the failure is reported", lambda: agent.metrics().get(failed) == 1, 20, 0.1)
        stamps, took_s, ages_s = list[float](), list[float](), list[float]()
        for _ in range(5):
            asked = time.monotonic()
            page = agent.metrics()
            took_s.append(time.monotonic() - asked)
            stamps.append(page["gpuwatch_sample_timestamp_seconds",])
            ages_s.append(abs(time.time() - stamps[-1]))
            time.sleep(0.7)
        assert median(took_s) < 1 and median(ages_s) < 3, "a driver that is waited for takes 2 s of each"
        sampled = ("gpuwatch_sample_timestamp_seconds",)
        wait_for("samples go on", lambda: agent.metrics()[sampled] - stamps[0] > 1.5, 10)
        wait_for("its GPU is unknown", lambda: ledgers.state(0) == "unknown", 20)
        assert agent.log.read_text().count("NVML did not answer within 2 s") == 1
        nvml.write([gpu(0, busy=0)])
        wait_for("it is over", lambda: agent.metrics()[failed] == 0, 10, 0.2)
        assert ledgers.look(0)["unknown"] > 1
