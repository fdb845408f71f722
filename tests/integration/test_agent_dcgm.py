"""`gpuwatch agent --dcgm URL`: an exporter's recorded page over HTTP, processes from NVML."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent, Trainer
from tests.integration.test_agent_gpus import Ledgers
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import wait_for

PAGE = (Path(__file__).parents[1] / "fixtures/dcgm/l40s.txt").read_text().replace("GPU-l40s", "GPU-0")


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
        agent.metrics()
        agent.metrics()
        assert exporter.asked - asked <= 2  # a scrape asks nobody
