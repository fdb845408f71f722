"""An agent that serves made-up, known numbers (docs/reference/api.md), and the real Streamlit app in a subprocess."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from urllib.request import urlopen

from gpuwatch.ledger.states import GPU_STATES, RUN_STATES
from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.launch import streamlit_command
from tests.integration.dashboards.steps import MadeUpSteps
from tests.servers import free_port, stop, wait_for

INPUT_SHARE = 0.62
STEP_S = 0.103
RUN_ID = "node-17-4711-88123"

Counter = Callable[[float], float]


def idle_gpu() -> dict[str, Any]:
    """Return a finding about a GPU, as /api/v1/findings has it."""
    return {
        "run": None, "rank": None, "name": None, "cause": "held_idle", "severity": "warning", "gpu": "GPU-7",
        "title": "GPU 7 is held and idle", "ratio": 1.0, "advice": "End pid 4718 (python) of alice.",
        "evidence": [{"what": "idle", "value": 900, "unit": "s", "text": "no kernel for 15 minutes"}],
        "predicted_speedup": None, "since_s": time.time() - 900,
    }  # fmt: skip


def a_run(run: str = RUN_ID, name: str = "resnet50-a", age_s: float = 400.0, **more: Any) -> dict[str, Any]:
    """Return a run as /api/v1/runs has it, `INPUT_SHARE` of whose last minute went to waiting for data."""
    now = time.time()
    steps = int(age_s / STEP_S)
    ledger = {"startup": 6.0, "input_wait": age_s * INPUT_SHARE, "compute": age_s * (0.97 - INPUT_SHARE) - 6.0}
    ledger["transfer"] = age_s * 0.03
    return {
        "run": run, "rank": 0, "name": name, "job": "", "host": "node-17", "pid": 4711, "user": "alice",
        "status": "running", "world_size": 1, "timeline": "host", "device": "cpu", "started_s": now - age_s,
        "watermark_s": now, "last_message_s": now, "steps": steps, "samples": steps * 64, "records_lost": 0,
        "activity": "step", "states": ledger,
        "recent": {"duration_s": 60.0, "states": {"input_wait": 37.2, "compute": 21.0, "transfer": 1.8},
                   "step_s_p50": STEP_S, "step_s_p95": 0.131, "data_wait_s_p50": 0.064, "steps_per_s": 9.7,
                   "samples_per_s": 621.4},
        "verdict": {"state": "input", "ratio": INPUT_SHARE,
                    "sentence": "input-bound: 62% of the time training waited for data"},
        "findings": [{
            "cause": "input_single_process", "severity": "warning",
            "title": "the loader is the bottleneck: it runs in the training process", "ratio": INPUT_SHARE,
            "evidence": [
                {"what": "data_wait", "value": INPUT_SHARE, "unit": "ratio", "text": "data wait 62% of the time"},
                {"what": "workers", "value": 0, "unit": "", "text": "num_workers=0: batches are made between steps"},
                {"what": "cores", "value": 11, "unit": "cores", "text": "11 of 16 cores idle"}],
            "advice": "num_workers 0 → 8 (costs about 48 MiB of /dev/shm)", "predicted_speedup": 2.6,
            "since_s": now - 95.0, "gpu": None}],
        "loader": {"num_workers": 0, "prefetch_factor": None, "batch_size": 64, "pin_memory": False}, "tags": {},
        **more,
    }  # fmt: skip


def _integral(share: float, wave: float, period_s: float) -> Counter:
    """Return a counter that grows by `share` a second, more or less by `wave`."""
    return lambda t: share * t + wave * period_s / (2 * math.pi) * math.sin(2 * math.pi * t / period_s)


LEDGER: dict[str, Counter] = {
    "input_wait": lambda t: max(0.0, _integral(0.62, 0.1, 97)(t) - 6 * 0.62),
    "compute": lambda t: max(0.0, _integral(0.31, -0.1, 97)(t) - 6 * 0.31),
    "transfer": lambda t: 0.03 * max(0.0, t - 6),
    "eval": lambda t: 0.04 * max(0.0, t - 6),
    "startup": lambda t: min(t, 6.0),
}
SAMPLES: dict[str, list[tuple[dict[str, str], Counter]]] = {
    "gpuwatch_run_seconds_total": [({"state": s}, LEDGER.get(s, lambda t: 0.0)) for s in RUN_STATES],
    "gpuwatch_step_phase_seconds_total": [
        ({"phase": "data_wait"}, LEDGER["input_wait"]),
        ({"phase": "transfer"}, LEDGER["transfer"]),
        ({"phase": "compute"}, LEDGER["compute"]),
    ],
    "gpuwatch_steps_total": [({}, lambda t: t / STEP_S)],
    "gpuwatch_step_percentile_seconds": [
        ({"percentile": "p50"}, lambda t: STEP_S),
        ({"percentile": "p95"}, lambda t: 0.131),
    ],
    "gpuwatch_run_mfu_ratio": [({"rank": "0"}, lambda t: 0.41)],
    "gpuwatch_cpu_seconds_total": [
        ({"mode": "user"}, _integral(4.4, 1.2, 60)),
        ({"mode": "system"}, _integral(0.6, 0.1, 30)),
        ({"mode": "iowait"}, _integral(0.5, 0.4, 45)),
        ({"mode": "idle"}, _integral(10.5, -1.2, 60)),
    ],
    "gpuwatch_pressure_cpu_waiting_seconds_total": [({}, _integral(0.08, 0.05, 40))],
    "gpuwatch_pressure_io_waiting_seconds_total": [({}, _integral(0.03, 0.03, 70))],
    "gpuwatch_pressure_memory_waiting_seconds_total": [({}, lambda t: 0.0)],
    "gpuwatch_shm_used_bytes": [({"mount": "node"}, lambda t: 21 * 2**20 + 5 * 2**20 * math.sin(t / 30))],
    "gpuwatch_shm_size_bytes": [({"mount": "node"}, lambda t: 64.0 * 2**20)],
    "gpuwatch_network_receive_bytes_total": [({"device": "eth0"}, _integral(41e6, 2e7, 50))],
    "gpuwatch_network_transmit_bytes_total": [({"device": "eth0"}, _integral(2e6, 1e6, 50))],
    "gpuwatch_disk_read_bytes_total": [({"device": "nvme0n1"}, _integral(180e6, 9e7, 65))],
    "gpuwatch_disk_written_bytes_total": [({"device": "nvme0n1"}, _integral(6e6, 6e6, 65))],
}


def _gpu(n: int, high: float) -> Counter:
    return lambda t: high * (0.4 + 0.04 * n + 0.2 * math.sin(t / 20 + n))


def _gpu_seconds(n: int) -> list[tuple[dict[str, str], Counter]]:
    """Return a GPU's ledger: the first six belong to the run, the seventh to no run, the last is held idle."""
    own: dict[str, Counter] = {6: {"unallocated": lambda t: t}, 7: {"held_idle": lambda t: t}}.get(n, LEDGER)
    gpu = {"gpu": str(n), "UUID": f"GPU-{n}"}
    return [({**gpu, "state": state}, own.get(state, lambda t: 0.0)) for state in GPU_STATES]


GPU_NOW = (*(["input_wait"] * 6), "unallocated", "held_idle")
"""What each GPU does."""
GPU_SAMPLES: dict[str, list[tuple[dict[str, str], Counter]]] = {
    metric: [({"gpu": str(n), "UUID": f"GPU-{n}"}, _gpu(n, high)) for n in range(8)]
    for metric, high in (
        ("gpuwatch_gpu_utilization_ratio", 1.0),
        ("gpuwatch_gpu_power_watts", 700.0),
        ("gpuwatch_gpu_memory_used_bytes", 80.0 * 2**30),
    )
}
GPU_SAMPLES["gpuwatch_gpu_memory_total_bytes"] = [
    ({"gpu": str(n), "UUID": f"GPU-{n}"}, lambda t: 80.0 * 2**30) for n in range(8)
]
GPU_SAMPLES["gpuwatch_gpu_seconds_total"] = [series for n in range(8) for series in _gpu_seconds(n)]


@dataclass
class FakeAgent:
    """The agent's API on a free port. What it says may be changed while it runs."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    gpus: bool = False
    port: int = 0
    steps: dict[str, MadeUpSteps] = field(default_factory=dict)
    """By run."""
    past: list[dict[str, Any]] = field(default_factory=list)
    """What was found, as /api/v1/runs/{run}/findings has it."""
    requests: int = 0
    _connections: list[socket.socket] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        agent = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                agent.requests += 1
                if url.path == "/api/v1/series/many":
                    asked = [dict(parse_qsl(text, keep_blank_values=True)) for _, text in parse_qsl(url.query)]
                    answer: dict[str, Any] | None = {"answers": [agent.answer("/api/v1/series", one) for one in asked]}
                else:
                    answer = agent.answer(url.path, dict(parse_qsl(url.query)))
                body = json.dumps(answer or {"error": f"{url.path}: no such path"}).encode()
                if url.path == "/metrics":
                    answer, body = {}, agent.metrics().encode()
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def setup(self) -> None:
                agent._connections.append(self.request)
                super().setup()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: Any) -> None:
                """Say nothing of connections that `stop` cut."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            for connection in self._connections:  # kept alive by the client: an agent that died would have closed them
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections.clear()
            self._server = None

    def answer(self, path: str, query: dict[str, str]) -> dict[str, Any] | None:
        if path == "/api/v1/runs":
            return {"runs": self.runs}
        if path == "/api/v1/status":
            collectors = [{"name": "cpu", "success": True, "duration_s": 0.0004, "message": None}]
            if not self.gpus:
                collectors.append({"name": "gpu", "success": None, "duration_s": 0.0, "message": "no NVIDIA driver"})  # type: ignore[dict-item]
            gpus = [self.gpu(n) for n in range(8)] if self.gpus else []
            return {"version": "0.1.0", "host": "node-17", "time_s": time.time(), "started_s": 0.0, "gpus": gpus,
                    "collectors": collectors, "history": {"path": "/h", "bytes": 1, "failures": 0}, "listen": []}  # fmt: skip
        if path == "/api/v1/series":
            return self._series(query)
        if path == "/api/v1/findings":
            return {"findings": [idle_gpu()] if self.gpus else []}
        if path.startswith("/api/v1/runs/"):
            return self._of_run(path.removeprefix("/api/v1/runs/"), query)
        return None

    def _of_run(self, path: str, query: dict[str, str]) -> dict[str, Any] | None:
        run, _, what = path.rpartition("/")
        if what == "findings":
            return {"run": run, "findings": [found for found in self.past if found.get("run", run) == run]}
        known = next((r for r in self.runs if r["run"] == run), None)
        if known is None or run not in self.steps:
            return None
        if "last" in query:
            return self.steps[run].records(known["started_s"], int(query["last"]))
        return self.steps[run].downsampled(known["started_s"], query)

    def gpu(self, n: int) -> dict[str, Any]:
        """Return a GPU as /api/v1/status has it."""
        state, memory = GPU_NOW[n], (10 + n) * 2**30
        return {"gpu": str(n), "uuid": f"GPU-{n}", "name": "NVIDIA H100 80GB HBM3", "state": state, "utilization_ratio": 0.1 * n,
                "memory_used_bytes": memory, "memory_total_bytes": 80 * 2**30, "power_watts": 100.0 * (n + 1),
                "run": RUN_ID if n < 6 else None,
                "owner": None if state == "unallocated" else f"alice, pid {4711 + n} (python)"}  # fmt: skip

    def metrics(self) -> str:
        """Return what Prometheus scrapes: the same numbers as they are now."""
        now, run = time.time(), self.runs[0]
        own = {"run": run["run"], "rank": "0"}
        lines: list[tuple[str, dict[str, str], float]] = [
            ("gpuwatch_run_info", {**own, "name": run["name"], "user": "alice", "timeline": "host", "device": "cpu",
                                   "world_size": "1", "num_workers": "0"}, 1),
            ("gpuwatch_run_up", own, 1),
            ("gpuwatch_ledger_watermark_timestamp_seconds", own, now),
            ("gpuwatch_finding_active", {"run": run["run"], "cause": "input_single_process"}, 1),
            ("gpuwatch_finding_evidence_ratio", {"run": run["run"], "cause": "input_single_process"}, INPUT_SHARE),
            ("gpuwatch_gpus_seen", {}, 8),
            ("gpuwatch_loader_workers", own, 4),
            ("gpuwatch_loader_worker_cpu_seconds_total", own, 3.2 * (now - run["started_s"])),
        ]  # fmt: skip
        for n in range(8):
            gpu = {"gpu": str(n), "UUID": f"GPU-{n}"}
            owned = {"run": run["run"] if n < 6 else "", "rank": "0" if n < 6 else "", "user": "alice", "job_id": "17",
                     "workload_namespace": "", "workload_pod": "", "workload_container": ""}  # fmt: skip
            lines += [
                ("gpuwatch_gpu_info", {**gpu, "modelName": "NVIDIA H100 80GB HBM3"}, 1),
                ("gpuwatch_gpu_owner_info", {**gpu, **owned}, 1),
            ]
        for metric, known in {**SAMPLES, **GPU_SAMPLES}.items():
            labels = own if "run" in BY_NAME[metric].labels else {}
            lines += [(metric, {**labels, **more}, value(now - run["started_s"])) for more, value in known]
        return "".join(
            f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in labels.items())}}} {value}\n"
            for name, labels, value in lines
        )

    def _series(self, query: dict[str, str]) -> dict[str, Any]:
        metric = BY_NAME[query["metric"]]
        start, end, points = float(query["start"]), float(query["end"]), int(query["points"])
        run = next((r for r in self.runs if r["run"] == query.get("run")), self.runs[0] if self.runs else None)
        begin = run["started_s"] if run else time.time() - 4000.0
        own = {"run": run["run"], "rank": query.get("rank", "0")} if run and "run" in metric.labels else {}
        spacing = max(1.0, (end - start) / points)
        first = math.ceil(max(start, begin) / spacing)
        times = [n * spacing for n in range(first, math.floor(end / spacing) + 1)]
        known = {**SAMPLES, **(GPU_SAMPLES if self.gpus else {})}.get(metric.name, [])
        known = [k for k in known if "gpu" not in query or k[0]["gpu"] == query["gpu"]]
        by = [b for b in query["by"].split(",") if b] if "by" in query else None
        summed: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for labels, value in known:
            shown = {n: v for n, v in {**own, **labels}.items() if by is None or n in by}
            sums = summed.setdefault(tuple(shown.items()), [0.0] * len(times))
            for n, t in enumerate(times):
                sums[n] += value(t - begin)
        series = [
            {"labels": dict(labels), "points": list(zip(times, values, strict=True))}
            for labels, values in summed.items()
            if times
        ]
        return {"metric": metric.name, "kind": metric.kind, "unit": metric.unit, "series": series}


@contextmanager
def streamlit_page(agent_url: str, log: Path, prometheus_url: str | None = None) -> Iterator[str]:
    """Start the real app; give its URL; end it."""
    port = free_port()
    argv, environment = streamlit_command(port, "127.0.0.1", agent_url, prometheus_url)
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for("the page", lambda: _answers(f"{url}/_stcore/health", process, log), 60, 0.1)
            yield url
        finally:
            stop(process)


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"streamlit ended with {process.returncode}:\n{log.read_text()}"
    with urlopen(url, timeout=1) as response:
        return bool(response.status == 200)
