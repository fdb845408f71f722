"""Simulated nodes' /metrics from one port. Within a piece of a node's story its page is one template whose values are linear in time.

Rendering a page is then arithmetic on some hundred numbers, so that one process serves a thousand nodes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sin
from typing import Any

from gpuwatch.ledger.states import (
    COMM_WAIT,
    COMPUTE,
    GPU_STATES,
    HELD_IDLE,
    HOST_WAIT,
    INPUT_WAIT,
    OTHER,
    RUN_STATES,
    STALLED,
    TRANSFER,
)
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.simulation.story import FINDINGS, Job, Node, Piece

TEXT = "text/plain; version=0.0.4; charset=utf-8"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
STEP_STATES = (INPUT_WAIT, TRANSFER, COMPUTE, HOST_WAIT, COMM_WAIT)
PHASES = {"data_wait": (INPUT_WAIT,), "transfer": (TRANSFER,), "compute": (COMPUTE, HOST_WAIT, COMM_WAIT)}
BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
GONE_AFTER_S = 900.0
"""A run's series disappear this long after its end, as with the agent."""
GPU_BYTES = 141 * 2**30
GPM = {
    "gpuwatch_gpu_sm_active_ratio": 0.8,
    "gpuwatch_gpu_tensor_active_ratio": 0.4,
    "gpuwatch_gpu_dram_bandwidth_ratio": 0.5,
}
NODE_RATES = {
    "gpuwatch_cpu_seconds_total": {"user": 28.0, "system": 3.0, "iowait": 1.0, "idle": 160.0},
    "gpuwatch_disk_read_bytes_total": {"nvme0n1": 9e8},
    "gpuwatch_disk_written_bytes_total": {"nvme0n1": 4e7},
    "gpuwatch_disk_io_time_seconds_total": {"nvme0n1": 0.4},
    "gpuwatch_network_receive_bytes_total": {"eth0": 3e7, "ib0": 2e9},
    "gpuwatch_network_transmit_bytes_total": {"eth0": 2e7, "ib0": 2e9},
    "gpuwatch_pressure_cpu_waiting_seconds_total": {"": 0.05},
    "gpuwatch_pressure_io_waiting_seconds_total": {"": 0.1},
    "gpuwatch_pressure_io_stalled_seconds_total": {"": 0.02},
    "gpuwatch_pressure_memory_waiting_seconds_total": {"": 0.0},
    "gpuwatch_pressure_memory_stalled_seconds_total": {"": 0.0},
    "gpuwatch_messages_received_total": {"": 16.0},
    "gpuwatch_agent_cpu_seconds_total": {"": 0.03},
    "gpuwatch_nvml_call_seconds_total": {"utilization": 0.002, "memory": 0.001, "processes": 0.004, "gpm": 0.003},
}
NODE_GAUGES = {
    "gpuwatch_cpu_cores": (192, 0),
    "gpuwatch_load1": (40, 6),
    "gpuwatch_procs_running": (30, 0),
    "gpuwatch_memory_total_bytes": (2 * 2**40, 0),
    "gpuwatch_memory_available_bytes": (1.5 * 2**40, 2**30),
    "gpuwatch_history_bytes": (5e8, 0),
    "gpuwatch_history_failures_total": (0, 0),
    "gpuwatch_agent_resident_memory_bytes": (1.2e8, 0),
}
"""Value and amplitude of its wiggle."""


@dataclass(frozen=True)
class Line:
    """One series: base + pace × (time − the piece's start) + wiggle × a sine."""

    metric: str
    labels: Mapping[str, str]
    base: float
    pace: float = 0.0
    wiggle: float = 0.0


@dataclass
class Template:
    """A page within one piece."""

    begin_s: float
    end_s: float
    text: str = ""
    lines: list[tuple[float, float]] = field(default_factory=list)
    waves: list[tuple[float, float]] = field(default_factory=list)

    def render(self, time_s: float) -> bytes:
        since_s = time_s - self.begin_s
        values = [base + pace * since_s for base, pace in self.lines]
        values += [base + size * sin(time_s / 7 + base + place) for place, (base, size) in enumerate(self.waves)]
        return (self.text % tuple(values)).encode()


class NodePages:
    """A node's pages over time; times must not decrease."""

    def __init__(self, node: Node, epoch_s: float) -> None:
        """`epoch_s`: Unix time of the simulation's start."""
        self.node = node
        self._epoch_s = epoch_s
        self._pieces = node.pieces()
        self._piece = next(self._pieces)
        self._states = dict.fromkeys(GPU_STATES, 0.0)
        self._run_states: dict[str, float] = dict.fromkeys(RUN_STATES, 0.0)
        self._energy_j = 0.0
        self._former: tuple[Job, dict[str, float]] | None = None
        self._template: Template | None = None

    def body(self, time_s: float) -> bytes | None:
        """Return the page, `time_s` after the simulation's start; None while the node's agent is down."""
        while time_s >= self._piece.end_s:
            self._close()
        if self.node.agent_is_down(time_s):
            return None
        template = self._template
        if template is None or not template.begin_s <= time_s < template.end_s:
            template = self._template = self._make(time_s)
        return template.render(time_s)

    def _close(self) -> None:
        piece, length_s = self._piece, self._piece.end_s - self._piece.begin_s
        self._template = None
        for state, share in piece.mix.items():
            self._states[state] += share * length_s
            if state in self._run_states:
                self._run_states[state] += share * length_s
        self._energy_j += piece.power_w * length_s
        self._piece = next(self._pieces)
        if self._piece.job is not piece.job:
            self._former = (piece.job, self._run_states) if piece.job.run else None
            self._run_states = dict.fromkeys(RUN_STATES, 0.0)

    def _make(self, time_s: float) -> Template:
        """Return the template from now until the next change."""
        piece, lost_s = self._piece, self.node.gpu_lost_s
        gone_s = self._former[0].end_s + GONE_AFTER_S if self._former is not None else None
        lost = lost_s is not None and time_s >= lost_s
        changes = [piece.end_s, *(at_s for at_s in (lost_s, gone_s) if at_s is not None and at_s > time_s)]
        template = Template(piece.begin_s, min(changes))
        lines = [*self._gpu_lines(lost), *self._run_lines(), *self._node_lines(lost)]
        if self._former is not None and gone_s is not None and time_s < gone_s:
            job, states = self._former
            for gpu in range(self.node.gpus):
                lines += _rank_lines(job, self.node, gpu, states, None, 0.0)
        parts, waves = [], []
        for name in BY_NAME:
            mine = [line for line in lines if _family(line.metric) == name]
            if mine:
                metric = BY_NAME[name]
                kind = "gauge" if metric.kind == "info" else metric.kind
                parts.append(f"# HELP {name} {metric.help.replace('%', '%%')}\n# TYPE {name} {kind}\n")
            for line in mine:
                labels = ",".join(f'{key}="{value}"' for key, value in line.labels.items() if value).replace("%", "%%")
                body = f"{line.metric}{{{labels}}}" if labels else line.metric
                if line.wiggle:
                    waves.append((body, line))
                elif line.pace:
                    parts.append(f"{body} %.3f\n")
                    template.lines.append((line.base, line.pace))
                else:
                    parts.append(f"{body} {line.base:.10g}\n")
        for body, line in waves:  # their values follow those of the straight lines
            parts.append(f"{body} %.4f\n")
            template.waves.append((line.base, line.wiggle))
        template.text = "".join(parts)
        return template

    def _key(self, gpu: int) -> dict[str, str]:
        return {"gpu": str(gpu), "UUID": f"GPU-{self.node.number:05d}-{gpu:02d}"}

    def _gpu_lines(self, lost: bool) -> Iterator[Line]:
        piece = self._piece
        job = piece.job
        for gpu in range(self.node.gpus - lost):
            key = self._key(gpu)
            for state in GPU_STATES:
                share = piece.mix.get(state, 0.0)
                yield Line("gpuwatch_gpu_seconds_total", {**key, "state": state}, self._states[state], share)
            yield Line("gpuwatch_gpu_ledger_watermark_timestamp_seconds", key, self._epoch_s + piece.begin_s, 1.0)
            info = {"model": "NVIDIA H200", "pci_bus_id": f"0000:{gpu:02x}:00.0", "driver_version": "580.0"}
            yield Line("gpuwatch_gpu_info", {**key, **info}, 1)
            rank = str(self.node.first_rank + gpu) if job.run else ""
            held = job.kind != "free"
            tenant = {"user": job.user, "job_id": str(job.number)} if held else {}
            yield Line("gpuwatch_gpu_owner_info", {**key, "run": job.run, "rank": rank, **tenant}, 1)
            yield Line("gpuwatch_gpu_utilization_ratio", key, piece.utilization, 0, 0.03 if piece.utilization else 0)
            yield Line("gpuwatch_gpu_memory_used_bytes", key, 0.8 * GPU_BYTES if held else 5e8)
            yield Line("gpuwatch_gpu_memory_total_bytes", key, GPU_BYTES)
            yield Line("gpuwatch_gpu_power_watts", key, piece.power_w, 0, 9)
            yield Line("gpuwatch_gpu_energy_joules_total", key, self._energy_j, piece.power_w)
            hot = self.node.throttled and gpu == 0
            yield Line("gpuwatch_gpu_temperature_celsius", key, 92 if hot else 35 + piece.power_w / 20, 0, 1)
            for reason in ("power", "thermal", "hardware"):
                yield Line("gpuwatch_gpu_throttled", {**key, "reason": reason}, float(hot and reason == "thermal"))
            if hot:
                yield Line("gpuwatch_gpu_ecc_errors_total", {**key, "kind": "corrected"}, 12)
                yield Line("gpuwatch_gpu_nvlink_errors_total", key, 4)
                yield Line("gpuwatch_gpu_pcie_replays_total", key, 7)
            yield Line("gpuwatch_gpu_processes", key, float(held))
            if HELD_IDLE in piece.mix:
                yield Line("gpuwatch_gpu_holder_pid", {**key, "command": "python"}, 4000 + gpu)
            yield Line("gpuwatch_gpu_sm_clock_hertz", key, 1.98e9 if piece.utilization else 3.45e8)
            for metric, share in GPM.items():
                yield Line(metric, key, share * piece.mix.get(COMPUTE, 0.0), 0, 0.02 if piece.utilization else 0)
        if lost:
            key = self._key(self.node.gpus - 1)
            yield Line("gpuwatch_gpu_xid_errors_total", key, 1)
            yield Line("gpuwatch_gpu_last_xid", key, 79)
            yield Line("gpuwatch_gpu_last_xid_timestamp_seconds", key, self._epoch_s + (self.node.gpu_lost_s or 0))

    def _run_lines(self) -> Iterator[Line]:
        piece = self._piece
        if not piece.job.run:
            return
        for gpu in range(self.node.gpus):
            yield from _rank_lines(piece.job, self.node, gpu, self._run_states, piece, self._epoch_s)
        yield from self._job_lines(piece)
        cause = FINDINGS.get(piece.job.kind)
        if cause is not None and (cause != "stalled" or STALLED in piece.mix):
            yield Line("gpuwatch_finding_active", {"run": piece.job.run, "cause": cause}, 1)
            yield Line("gpuwatch_finding_evidence_ratio", {"run": piece.job.run, "cause": cause}, 0.3)
        if cause == "straggler" and self.node.first_rank == 0:
            yield Line("gpuwatch_straggler_excess_ratio", {"run": piece.job.run, "rank": "0"}, 0.18)

    def _job_lines(self, piece: Piece) -> Iterator[Line]:
        """Yield the ledger of a job that was not interrupted."""
        job, states = {"job_id": str(piece.job.number)}, self._run_states
        for state in RUN_STATES:
            if states[state] or piece.mix.get(state):
                yield Line(
                    "gpuwatch_job_seconds_total", {**job, "state": state}, states[state], piece.mix.get(state, 0.0)
                )
        yield Line("gpuwatch_job_attempts_total", job, 1)
        if wall_s := sum(states.values()):
            yield Line("gpuwatch_job_goodput_ratio", job, states[COMPUTE] / wall_s)

    def _node_lines(self, lost: bool) -> Iterator[Line]:
        since_s = self._piece.begin_s - self.node.begin_s
        for metric, rates in NODE_RATES.items():
            for value, rate in rates.items():
                labels = dict(zip(BY_NAME[metric].labels, (value,), strict=False))
                yield Line(metric, labels, rate * since_s, rate)
        for port in range(4):
            key = {"device": f"mlx5_{port}", "port": "1"}
            for way in ("received", "transmitted"):
                yield Line(f"gpuwatch_infiniband_port_data_{way}_bytes_total", key, 2e9 * since_s, 2e9)
        if self.node.throttled:  # faults come together
            yield Line("gpuwatch_infiniband_symbol_errors_total", {"device": "mlx5_0", "port": "1"}, 9)
            yield Line("gpuwatch_infiniband_link_downed_total", {"device": "mlx5_0", "port": "1"}, 1)
            yield Line("gpuwatch_messages_rejected_total", {"reason": "version"}, 3)
            yield Line("gpuwatch_run_failures_total", {"reason": "given_up"}, 2)
            for metric in ("runs_kept_apart", "history_bad_rows", "history_damaged"):
                yield Line(f"gpuwatch_{metric}_total", {}, 1)
        job = self._piece.job
        alone = self.node.gpus if job.kind != "free" and not job.run else 0
        yield Line("gpuwatch_processes_without_hook", {}, alone)
        yield Line("gpuwatch_gpus_seen", {}, self.node.gpus - lost)
        yield Line("gpuwatch_gpus_expected", {}, self.node.gpus)
        for metric, (base, wiggle) in NODE_GAUGES.items():
            yield Line(metric, {}, base, 0, wiggle)
        yield Line("gpuwatch_shm_size_bytes", {"mount": "host"}, 2**40)
        yield Line("gpuwatch_shm_used_bytes", {"mount": "host"}, 0.2 * 2**40, 0, 2**30)
        for collector in ("cpu", "load", "pressure", "memory", "shm", "disk", "network", "gpu", "agent_process"):
            yield Line("gpuwatch_collector_duration_seconds", {"collector": collector}, 0.002, 0, 0.0005)
            yield Line("gpuwatch_collector_success", {"collector": collector}, 1)
        yield Line("gpuwatch_build_info", {"version": "simulated"}, 1)
        yield Line("gpuwatch_sample_timestamp_seconds", {}, self._epoch_s + self._piece.begin_s, 1.0)


def _rank_lines(
    job: Job, node: Node, gpu: int, states: Mapping[str, float], piece: Piece | None, epoch_s: float
) -> Iterator[Line]:
    """Yield one rank's series; `piece` None: the run has ended, and nothing moves."""
    key = {"run": job.run, "rank": str(node.first_rank + gpu)}
    mix = piece.mix if piece is not None else {}
    for state in RUN_STATES:
        yield Line("gpuwatch_run_seconds_total", {**key, "state": state}, states[state], mix.get(state, 0.0))
    begin_s = piece.begin_s if piece is not None else job.end_s
    pace = 1.0 if piece is not None else 0.0
    yield Line("gpuwatch_ledger_watermark_timestamp_seconds", key, epoch_s + begin_s, pace)
    for phase, parts in PHASES.items():
        yield Line(
            "gpuwatch_step_phase_seconds_total", {**key, "phase": phase}, sum(states[s] for s in parts),
            sum(mix.get(s, 0.0) for s in parts),
        )  # fmt: skip
    if job.kind == "straggler" and gpu == 0:
        rollout = {**key, "phase": "rollout"}
        yield Line("gpuwatch_phase_seconds_total", rollout, states[OTHER], mix.get(OTHER, 0.0))
    stepped_s, stepping = sum(states[s] for s in STEP_STATES), sum(mix.get(s, 0.0) for s in STEP_STATES)
    steps, steps_per_s = stepped_s / job.step_s, stepping / job.step_s
    yield Line("gpuwatch_steps_total", key, steps, steps_per_s)
    yield Line("gpuwatch_samples_total", key, 64 * steps, 64 * steps_per_s)
    yield Line("gpuwatch_comm_steps_total", key, steps, steps_per_s)
    for what, of_step in {"fetches": 1.0, "ready_batches": 3.0}.items():
        yield Line(f"gpuwatch_loader_{what}_total", key, of_step * steps, of_step * steps_per_s)
    waited, waiting = states[INPUT_WAIT] / job.step_s, mix.get(INPUT_WAIT, 0.0) / job.step_s
    yield Line("gpuwatch_loader_empty_fetches_total", key, waited, waiting)
    yield Line("gpuwatch_fetches_sampled_total", key, steps / 8, steps_per_s / 8)
    if stepping:
        for percentile, longer in (("p50", 1.0), ("p95", 1.3)):
            yield Line("gpuwatch_step_percentile_seconds", {**key, "percentile": percentile}, longer * job.step_s)
    if job.number % 2:  # a language model that declares its operations and counts its tokens
        yield Line("gpuwatch_tokens_total", key, 2048 * steps, 2048 * steps_per_s)
        if stepping:
            yield Line("gpuwatch_run_mfu_ratio", key, 0.5 * mix[COMPUTE])
    if job.kind == "starved":
        yield Line("gpuwatch_unverified_steps_total", key, steps / 100, steps_per_s / 100)
    for bound in (*BUCKETS_S, float("inf")):
        share = 1.0 if bound >= job.step_s * 1.5 else 0.9 if bound >= job.step_s else 0.0
        text = "+Inf" if bound == float("inf") else repr(bound)
        yield Line("gpuwatch_step_seconds_bucket", {**key, "le": text}, share * steps, share * steps_per_s)
    yield Line("gpuwatch_step_seconds_count", key, steps, steps_per_s)
    yield Line("gpuwatch_step_seconds_sum", key, stepped_s, stepping)
    yield Line("gpuwatch_last_step_timestamp_seconds", key, epoch_s + begin_s, 1.0 if stepping else 0.0)
    settings = {"timeline": "device", "device": "cuda", "num_workers": "8", "version": "simulated"}
    who = {"name": f"{job.kind}-{job.number}", "job_id": str(job.number), "user": job.user}
    world = str(node.gpus * 4 if node.shares_runs else node.gpus)
    yield Line("gpuwatch_run_info", {**key, **who, **settings, "world_size": world}, 1)
    yield Line("gpuwatch_run_up", key, pace)
    yield Line("gpuwatch_step_records_lost_total", key, 0)
    age_s = begin_s - job.begin_s
    yield Line("gpuwatch_hook_overhead_seconds_total", key, 0.002 * age_s, 0.002 * pace)
    yield Line("gpuwatch_loader_worker_cpu_seconds_total", key, 4 * age_s, 4 * pace)
    yield Line("gpuwatch_loader_workers", key, 8 * pace)
    yield Line("gpuwatch_loader_workers_in_disk_wait", key, 0)
    yield Line("gpuwatch_loader_worker_read_bytes_total", key, 2e7 * age_s, 2e7 * pace)
    if job.kind == "starved":
        yield Line("gpuwatch_loader_worker_written_bytes_total", key, 1e5 * age_s, 1e5 * pace)
    yield Line("gpuwatch_loader_worker_run_queue_seconds_total", key, 0.1 * age_s, 0.1 * pace)
    yield Line("gpuwatch_run_resident_memory_bytes", key, 4e10)
    yield Line("gpuwatch_device_steps_total", key, steps, steps_per_s)
    yield Line("gpuwatch_hidden_input_wait_seconds_total", key, 0.1 * stepped_s, 0.1 * stepping)
    if gpu == 0:  # one series a control group
        yield Line("gpuwatch_run_memory_limit_bytes", key, 1.8 * 2**40)
        yield Line("gpuwatch_run_memory_used_bytes", key, 2**39)
        if job.kind == "hang" and piece is not None and STALLED in piece.mix:
            yield Line("gpuwatch_run_oom_kills_total", key, 1)
        for what in ("cpu", "io", "memory"):
            yield Line(f"gpuwatch_run_pressure_{what}_waiting_seconds_total", key, 0.02 * age_s, 0.02 * pace)


def _family(metric: str) -> str:
    for suffix in ("_bucket", "_count", "_sum"):
        name = metric.removesuffix(suffix)
        if name != metric and name in BY_NAME and BY_NAME[name].kind == "histogram":
            return name
    return metric


class Fleet:
    """An ASGI application: `/node/N/metrics`, and `/sd` for Prometheus' HTTP service discovery. `now_s` returns Unix time."""

    def __init__(
        self, nodes: int, gpus: int, seed: int, epoch_s: float, now_s: Callable[[], float], address: str
    ) -> None:
        self._epoch_s = epoch_s
        self._now_s = now_s
        self._nodes = [NodePages(Node(seed, number, gpus), epoch_s) for number in range(nodes)]
        labels = [
            {"__metrics_path__": f"/node/{pages.node.number}/metrics", "instance": f"{pages.node.name}:9478"}
            for pages in self._nodes
        ]
        self._targets = json.dumps([{"targets": [address], "labels": each} for each in labels]).encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        status, kind, body = self.answer(scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return (status, content type, body) for a path."""
        parts = path.strip("/").split("/")
        if parts == ["sd"]:
            return 200, "application/json", self._targets
        if len(parts) == 3 and parts[0] == "node" and parts[2] == "metrics" and parts[1].isdigit():
            number = int(parts[1])
            if number < len(self._nodes):
                body = self._nodes[number].body(self._now_s() - self._epoch_s)
                return (503, TEXT, b"this agent is down\n") if body is None else (200, TEXT, body)
        return 404, TEXT, f"/sd lists the nodes; /node/0/metrics to /node/{len(self._nodes) - 1}/metrics\n".encode()


def serve(fleet: Fleet, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    uvicorn.run(
        fleet, host=host, port=port, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=120
    )
