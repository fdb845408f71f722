"""`gpuwatch agent --dcgm URL`: an exporter's recorded page over HTTP, processes from NVML."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent, Trainer
from tests.integration.gpus.test_agent_gpus import Ledgers
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.programs import ROOT
from tests.servers import wait_for

FIXTURES = ROOT / "tests/fixtures/dcgm"
PAGE = (FIXTURES / "l40s.txt").read_text().replace("GPU-l40s", "GPU-0")


class Exporter:
    """Serves a page at /metrics; `status` is what it answers with."""

    def __init__(self) -> None:
        exporter = self
        self.page, self.status, self.asked = PAGE, 200, 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                exporter.asked += 1
                body = exporter.page.encode() if self.path == "/metrics" else b""
                self.send_response(exporter.status if body else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    exporter.close()


def test_gpus_through_an_exporter(tmp_path: Path, exporter: Exporter) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([FakeGpu(uuid="GPU-0", power_mw=999_000)])
    with (
        Agent(tmp_path, "--dcgm", exporter.url, environment=nvml.environment()) as agent,
        Trainer(agent, run="on-dcgm") as trainer,
    ):
        ledgers = Ledgers(agent)
        gpu = ("0", "GPU-0")
        wait_for("the exporter is read", lambda: ("gpuwatch_gpu_power_watts", *gpu) in agent.metrics(), 20)
        page = agent.metrics()
        assert page[("gpuwatch_gpu_power_watts", *gpu)] == 35.686  # the exporter's, not NVML's
        assert page[("gpuwatch_gpu_info", *gpu, "NVIDIA L40S", "00000000:00:07.0", "595.58.03")] == 1
        assert (page["gpuwatch_gpus_seen",], page["gpuwatch_gpus_expected",]) == (1, 1)
        assert not any(key[0] == "gpuwatch_nvml_call_seconds_total" and key[1] == "power" for key in page)
        nvml.write([FakeGpu(uuid="GPU-0", processes=((trainer.pid, 1 << 30),))])
        wait_for("its process is seen", lambda: ledgers.owner(0) == ("on-dcgm", "0"), 15, 0.3)
        wait_for("the run's states are the GPU's", lambda: ledgers.look(0).get("input_wait", 0) > 0.2, 10, 0.3)
        exporter.status = 500
        failed = ("gpuwatch_collector_failed", "gpu")
        wait_for("the failure is reported", lambda: agent.metrics().get(failed) == 1, 10, 0.2)
        wait_for("the GPU is unknown", lambda: ledgers.state(0) == "unknown", 10, 0.2)
        assert f"dcgm-exporter at {exporter.url}/metrics cannot be read (HTTP status 500)" in agent.log.read_text()
        exporter.status = 200
        wait_for("it is read again", lambda: agent.metrics()[failed] == 0, 10, 0.2)
        asked = exporter.asked
        for _ in range(40):
            agent.metrics()
        assert exporter.asked - asked < 30  # a scrape sends no query, a second does


def test_mig_instances_have_activity_from_the_exporter_and_processes_from_nvml(
    tmp_path: Path, exporter: Exporter
) -> None:
    """A recorded page of an A800 in three instances, with the profiling fields that it was printed without."""
    labels = 'gpu="0",UUID="GPU-mig",device="nvidia0",GPU_I_PROFILE="2g.20gb"'
    values = {"DEV_GPU_UTIL": 0, "DEV_FB_USED": 512, "PROF_SM_ACTIVE": 0}
    fields = [f'DCGM_FI_{n}{{{labels},GPU_I_ID="{i}"}} {v}' for n, v in values.items() for i in (3, 5, 6)]
    fields += [f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels},GPU_I_ID="{i}"}} {v}' for i, v in ((3, 0.75), (5, 0), (6, 0))]
    exporter.page = "\n".join([(FIXTURES / "a800-mig.txt").read_text().rstrip(), *fields, ""])
    nvml, mig = FakeNvml(tmp_path), tuple((i, "2g.20gb", 0, 20 << 30, f"MIG-{i}") for i in (3, 5, 6))
    processes = ((os.getpid(), 1 << 30, 0), (os.getppid(), 1 << 30, 1))
    nvml.write([FakeGpu(uuid="GPU-mig", mig=mig, processes=processes), FakeGpu(uuid="GPU-whole")])
    with Agent(tmp_path, "--dcgm", exporter.url, environment=nvml.environment()) as agent:

        def states() -> dict[str, str]:
            return {each["uuid"]: each["state"] for each in agent.get("/api/v1/status")["gpus"]}

        expected = {"MIG-3": "busy_unattributed", "MIG-5": "held_idle", "MIG-6": "unallocated"}
        expected |= {"GPU-mig": "unallocated", "GPU-whole": "unallocated"}
        wait_for("each has its state", lambda: states() == expected, 40, 0.5)
        page = agent.metrics()
        assert {k[1:]: round(7 * v, 6) for k, v in page.items() if k[0] == "gpuwatch_gpu_mig_ratio"} == {
            ("0", "GPU-mig", "", ""): 1,
            **{(f"0:{n}", f"MIG-{i}", str(i), "2g.20gb"): 2 for n, i in enumerate((3, 5, 6))},
        }
        assert page["gpuwatch_gpu_memory_used_bytes", "0:1", "MIG-5"] == 512 << 20
        assert page["gpuwatch_gpu_power_watts", "0", "GPU-mig"] == 78.446
        assert not any(k[0] == "gpuwatch_gpu_utilization_ratio" for k in page)
