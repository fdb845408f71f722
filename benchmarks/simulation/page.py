"""Simulated nodes' /metrics from one port. Within a piece of a node's story its page is a template, linear in time.

Rendering a page is then arithmetic on some hundred numbers, so that one process serves a thousand nodes.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sin
from typing import Any

from benchmarks.simulation.story import FINDINGS, Job, Node, Piece
from gpuwatch.ledger import states as s
from gpuwatch.metrics import BY_NAME, CATALOGUE

TEXT = "text/plain; version=0.0.4; charset=utf-8"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
STEP_STATES = (s.INPUT_WAIT, s.TRANSFER, s.COMPUTE, s.HOST_WAIT, s.COMM_WAIT)
PHASES = {"data_wait": (s.INPUT_WAIT,), "transfer": (s.TRANSFER,), "compute": (s.COMPUTE, s.HOST_WAIT, s.COMM_WAIT)}
TAKEN_AFTER_S, GONE_AFTER_S = 10.0, 120.0
"""A run's series disappear this long after its end, and its `run_up`, as with an agent that is scraped every 5 s."""
QUIET_S = 900.0  # A state of a GPU disappears so long after its last second
GPU_BYTES = 141 * 2**30
NODE_RATES = {
    "cpu_seconds": {"user": 28.0, "system": 3.0, "iowait": 1.0, "idle": 160.0},
    "disk_read_bytes": {"nvme0n1": 9e8},
    "disk_written_bytes": {"nvme0n1": 4e7},
    "disk_io_time_seconds": {"nvme0n1": 0.4},
    "network_receive_bytes": {"eth0": 3e7, "ib0": 2e9},
    "network_transmit_bytes": {"eth0": 2e7, "ib0": 2e9},
    **{
        f"pressure_{what}_waiting_seconds": {"": rate} for what, rate in {"cpu": 0.05, "io": 0.1, "memory": 0.0}.items()
    },
    **{f"pressure_{what}_stalled_seconds": {"": rate} for what, rate in {"io": 0.02, "memory": 0.0}.items()},
    "messages_received": {"": 16.0},
    "agent_cpu_seconds": {"": 0.03},
}
NODE_GAUGES = {
    "cpu_cores": (192, 0),
    "load1": (40, 6),
    "procs_running": (30, 0),
    "memory_total_bytes": (2 * 2**40, 0),
    "memory_available_bytes": (1.5 * 2**40, 2**30),
    "history_bytes": (5e8, 0),
    "agent_resident_memory_bytes": (1.2e8, 0),
}
PER_STEP = {"steps": 1.0, "samples": 64.0, "loader_fetches": 1.0, "loader_ready_batches": 3.0}
PER_SECOND = {"hook_overhead_seconds": 0.002, "loader_worker_cpu_seconds": 4.0, "loader_worker_read_bytes": 2e7}
FAULTY_GPU = ("ecc_errors", "nvlink_errors", "pcie_replays")
FAULTY_NODE = ("infiniband_symbol_errors", "infiniband_link_downed", "messages_rejected", "run_failures")
FAULTY_AGENT = ("runs_kept_apart", "history_bad_rows", "history_damaged", "history_failures")
FAULT_LABELS = {"kind": "corrected", "device": "mlx5_0", "port": "1", "reason": "given_up"}


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
    begin_s: float
    end_s: float
    text: str = ""
    lines: list[tuple[float, float, float]] = field(default_factory=list)

    def render(self, time_s: float) -> bytes:
        since_s = time_s - self.begin_s
        values = [
            base + pace * since_s + (wiggle * sin(time_s / 7 + place) if wiggle else 0.0)
            for place, (base, pace, wiggle) in enumerate(self.lines)
        ]
        return (self.text % tuple(values)).encode()


class NodePages:
    """A node's pages over time; times must not decrease."""

    def __init__(self, node: Node, epoch_s: float) -> None:
        """`epoch_s`: Unix time of the simulation's start."""
        self.node = node
        self._epoch_s = epoch_s
        self._pieces = node.pieces()
        self._piece = next(self._pieces)
        self._states = dict.fromkeys(s.GPU_STATES, 0.0)
        self._left_s: dict[str, float] = {}  # by state: when the GPUs were last in it
        self._run_states: dict[str, float] = dict.fromkeys(s.RUN_STATES, 0.0)
        self._joules = dict.fromkeys(s.ENERGY_KINDS, 0.0)
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
        for states in (self._states, self._run_states):
            for state in states.keys() & piece.mix.keys():
                states[state] += piece.mix[state] * length_s
        for kind, share in s.by_kind(piece.mix).items():
            self._joules[kind] += share * piece.power_w * length_s
        self._left_s |= dict.fromkeys(piece.mix, piece.end_s)
        self._piece = next(self._pieces)
        if self._piece.job is not piece.job:
            self._former = (piece.job, self._run_states) if piece.job.run else None
            self._run_states = dict.fromkeys(s.RUN_STATES, 0.0)

    def _make(self, time_s: float) -> Template:
        piece, lost_s = self._piece, self.node.gpu_lost_s
        former = self._former
        ends = [former[0].end_s + after_s for after_s in (TAKEN_AFTER_S, GONE_AFTER_S)] if former is not None else []
        lost = lost_s is not None and time_s >= lost_s
        quiet = [left_s + QUIET_S for left_s in self._left_s.values()]
        changes = [piece.end_s, *(at_s for at_s in (lost_s, *ends, *quiet) if at_s is not None and at_s > time_s)]
        template = Template(piece.begin_s, min(changes))
        by_family: dict[str, list[Line]] = {metric.name: [] for metric in CATALOGUE}
        for line in self._lines(time_s, lost):
            when = BY_NAME[line.metric].when
            if when == "always" or (when in ("counted", "seen") and (line.base or line.pace or line.wiggle)):
                by_family[line.metric].append(line)
        if former is not None and time_s < ends[1]:
            for gpu in range(self.node.gpus):
                for line in _rank_lines(former[0], self.node, gpu, former[1], None, self._epoch_s):
                    if line.metric == "gpuwatch_run_up" or (time_s < ends[0] and (line.base or line.pace)):
                        by_family[line.metric].append(line)
        for name, lines in by_family.items():
            if not lines:
                continue
            kind = BY_NAME[name].kind.replace("info", "gauge")
            template.text += f"# HELP {name} {BY_NAME[name].help}\n# TYPE {name} {kind}\n".replace("%", "%%")
            for line in lines:
                labels = ",".join(f'{key}="{value}"' for key, value in line.labels.items() if value)
                template.text += f"{line.metric}{{{labels}}} ".replace("%", "%%")
                if line.pace or line.wiggle:
                    template.text += "%.4f\n"
                    template.lines.append((line.base, line.pace, line.wiggle))
                else:
                    template.text += f"{line.base:.10g}\n"
        return template

    def _lines(self, time_s: float, lost: bool) -> Iterator[Line]:
        piece, node = self._piece, self.node
        for gpu in range(node.gpus - lost):
            yield from self._gpu_lines(time_s, gpu)
        if lost:
            key = self._key(node.gpus - 1)
            yield Line("gpuwatch_gpu_xid_errors_total", key, 1)
            yield Line("gpuwatch_gpu_last_xid", key, 79)
            yield Line("gpuwatch_gpu_last_xid_timestamp_seconds", key, self._epoch_s + (node.gpu_lost_s or 0))
        if piece.job.run:
            for gpu in range(node.gpus):
                yield from _rank_lines(piece.job, node, gpu, self._run_states, piece, self._epoch_s)
            yield from self._run_lines()
        yield from self._node_lines(lost)

    def _key(self, gpu: int) -> dict[str, str]:
        return {"gpu": str(gpu), "UUID": f"GPU-{self.node.number:05d}-{gpu:02d}"}

    def _gpu_lines(self, time_s: float, gpu: int) -> Iterator[Line]:
        piece, job, key = self._piece, self._piece.job, self._key(gpu)
        held, hot, busy = job.kind != "free", self.node.throttled and gpu == 0, piece.utilization > 0
        for state in s.GPU_STATES:
            share = piece.mix.get(state, 0.0)
            if share or time_s - self._left_s.get(state, -QUIET_S) < QUIET_S:
                yield Line("gpuwatch_gpu_seconds_total", {**key, "state": state}, self._states[state], share)
        yield Line("gpuwatch_gpu_ledger_watermark_timestamp_seconds", key, self._epoch_s + piece.begin_s, 1.0)
        info = {"model": "NVIDIA H200", "pci_bus_id": f"0000:{gpu:02x}:00.0", "driver_version": "580.0"}
        yield Line("gpuwatch_gpu_info", {**key, **info}, 1)
        rank = str(self.node.first_rank + gpu) if job.run else ""
        tenant = {"user": job.user, "job_id": job.id} if held else {}
        yield Line("gpuwatch_gpu_owner_info", {**key, "run": job.run, "rank": rank, **tenant}, 1)
        yield Line("gpuwatch_gpu_utilization_ratio", key, piece.utilization, 0, 0.03 * busy)
        yield Line("gpuwatch_gpu_memory_used_bytes", key, 0.8 * GPU_BYTES if held else 5e8)
        yield Line("gpuwatch_gpu_memory_total_bytes", key, GPU_BYTES)
        yield Line("gpuwatch_gpu_power_watts", key, piece.power_w, 0, 9)
        for kind, part in s.by_kind(piece.mix).items():
            if part or any(time_s - self._left_s.get(state, -QUIET_S) < QUIET_S for state in s.ENERGY_KINDS[kind]):
                pace = part * piece.power_w
                yield Line("gpuwatch_gpu_energy_joules_total", {**key, "kind": kind}, self._joules[kind], pace)
        yield Line("gpuwatch_gpu_temperature_celsius", key, 92 if hot else 35 + piece.power_w / 20, 0, 1)
        for reason in ("power", "thermal", "hardware"):
            yield Line("gpuwatch_gpu_throttled", {**key, "reason": reason}, float(hot and reason == "thermal"))
        if hot:  # faults come together
            yield from (_fault(name, key) for name in (f"gpu_{each}" for each in FAULTY_GPU))
        yield Line("gpuwatch_gpu_processes", key, float(held))
        if s.HELD_IDLE in piece.mix:
            yield Line("gpuwatch_gpu_holder_pid", {**key, "command": "python"}, 4000 + gpu)
        for what, share in {"sm_active": 0.8, "tensor_active": 0.4, "dram_bandwidth": 0.5}.items():
            yield Line(f"gpuwatch_gpu_{what}_ratio", key, share * piece.mix.get(s.COMPUTE, 0.0), 0, 0.02 * busy)

    def _run_lines(self) -> Iterator[Line]:
        """Yield the findings, and the ledger of a job that was not interrupted."""
        piece, run, states = self._piece, self._piece.job.run, self._run_states
        cause = FINDINGS.get(piece.job.kind)
        if cause is not None and (cause != "stalled" or s.STALLED in piece.mix):
            yield Line("gpuwatch_finding_active", {"run": run, "cause": cause}, 1)
            yield Line("gpuwatch_finding_evidence_ratio", {"run": run, "cause": cause}, 0.3)
            yield Line("gpuwatch_finding_info", {"run": run, "cause": cause, "advice": "num_workers 4 → 9"}, 1)
        if cause == "straggler" and self.node.first_rank == 0:
            yield Line("gpuwatch_straggler_excess_ratio", {"run": run, "rank": "0"}, 0.18)
        if self.node.first_rank:
            return
        job = {"job_id": piece.job.id}
        yield Line("gpuwatch_job_start_timestamp_seconds", {**job, "run": run}, piece.job.begin_s)
        for state in s.RUN_STATES:
            share = piece.mix.get(state, 0.0)
            if states[state] or share:
                yield Line("gpuwatch_job_seconds_total", {**job, "state": state}, states[state], share)
        yield Line("gpuwatch_job_attempts_total", job, 1)
        if piece.job.kind == "sweep":  # whose earlier trials were killed and not resumed
            yield Line("gpuwatch_job_lost_seconds", job, 60)
        yield Line("gpuwatch_job_steps", {**job, "kind": "next"}, sum(states.values()) // piece.job.step_s)
        if wall_s := sum(states.values()):
            yield Line("gpuwatch_job_goodput_ratio", job, states[s.COMPUTE] / wall_s)

    def _node_lines(self, lost: bool) -> Iterator[Line]:
        job, since_s = self._piece.job, self._piece.begin_s - self.node.begin_s
        alone = self.node.gpus if job.kind != "free" and not job.run else 0
        for name, rates in NODE_RATES.items():
            metric = f"gpuwatch_{name}_total"
            for value, rate in rates.items():
                yield Line(metric, dict(zip(BY_NAME[metric].labels, (value,), strict=False)), rate * since_s, rate)
        for port in range(4):
            key = {"device": f"mlx5_{port}", "port": "1"}
            for way in ("received", "transmitted"):
                yield Line(f"gpuwatch_infiniband_port_data_{way}_bytes_total", key, 2e9 * since_s, 2e9)
        if self.node.throttled:  # faults come together
            yield from (_fault(name, {}) for name in (*FAULTY_NODE, *FAULTY_AGENT))
            yield Line("gpuwatch_collector_failed", {"collector": "gpu"}, 1)
            yield Line("gpuwatch_history_waiting_seconds", {}, 3)
        yield Line("gpuwatch_processes_without_hook", {}, alone)
        yield Line("gpuwatch_gpus_seen", {}, self.node.gpus - lost)
        yield Line("gpuwatch_gpus_expected", {}, self.node.gpus)
        for name, (base, wiggle) in NODE_GAUGES.items():
            yield Line(f"gpuwatch_{name}", {}, base, 0, wiggle)
        yield Line("gpuwatch_shm_size_bytes", {"mount": "host"}, 2**40)
        yield Line("gpuwatch_shm_used_bytes", {"mount": "host"}, 0.2 * 2**40, 0, 2**30)
        yield Line("gpuwatch_build_info", {"version": "simulated"}, 1)
        yield Line("gpuwatch_sample_timestamp_seconds", {}, self._epoch_s + self._piece.begin_s, 1.0)


def _fault(name: str, key: Mapping[str, str]) -> Line:
    labels = {label: FAULT_LABELS[label] for label in BY_NAME[f"gpuwatch_{name}_total"].labels if label in FAULT_LABELS}
    return Line(f"gpuwatch_{name}_total", {**key, **labels}, 4)


def _rank_lines(
    job: Job, node: Node, gpu: int, states: Mapping[str, float], piece: Piece | None, epoch_s: float
) -> Iterator[Line]:
    """Yield one rank's series; `piece` None: the run has ended, and nothing moves."""
    key = {"run": job.run, "rank": str(node.first_rank + gpu)}
    mix = piece.mix if piece is not None else {}
    begin_s, up = (piece.begin_s, 1.0) if piece is not None else (job.end_s, 0.0)

    def spent(*of: str) -> tuple[float, float]:
        """Return the seconds in these states, and their share of the time now."""
        return sum(states[state] for state in of), sum(mix.get(state, 0.0) for state in of)

    for state in s.RUN_STATES:
        yield Line("gpuwatch_run_seconds_total", {**key, "state": state}, *spent(state))
    for phase, parts in PHASES.items():
        yield Line("gpuwatch_step_phase_seconds_total", {**key, "phase": phase}, *spent(*parts))
    if job.kind == "straggler" and gpu == 0:
        yield Line("gpuwatch_phase_seconds_total", {**key, "phase": "rollout"}, *spent(s.OTHER))
    stepped_s, stepping = spent(*STEP_STATES)
    steps, steps_per_s = stepped_s / job.step_s, stepping / job.step_s
    settings = {"timeline": "device", "device": "cuda", "num_workers": "8", "version": "simulated"}
    who = {"name": f"{job.kind}-{job.number}", "job_id": job.id, "user": job.user}
    world = str(node.gpus * 4 if node.shares_runs else node.gpus)
    yield Line("gpuwatch_run_info", {**key, **who, **settings, "world_size": world}, 1)
    yield Line("gpuwatch_ledger_watermark_timestamp_seconds", key, epoch_s + begin_s, up)
    per_step = dict(PER_STEP)
    if job.number % 2:  # a language model that declares its operations and counts its tokens
        per_step["tokens"] = 2048.0
        if stepping:
            yield Line("gpuwatch_run_mfu_ratio", key, 0.5 * mix[s.COMPUTE])
            yield Line("gpuwatch_run_mfu_estimated_ratio", key, 0.54 * mix[s.COMPUTE])
    for name, each in per_step.items():
        yield Line(f"gpuwatch_{name}_total", key, each * steps, each * steps_per_s)
    waited, waiting = spent(s.INPUT_WAIT)
    yield Line("gpuwatch_loader_empty_fetches_total", key, waited / job.step_s, waiting / job.step_s)
    yield Line("gpuwatch_hidden_input_wait_seconds_total", key, 0.1 * stepped_s, 0.1 * stepping)
    per_second = {**PER_SECOND, **({"loader_worker_written_bytes": 1e5} if job.kind == "starved" else {})}
    if job.kind == "hang":
        per_second["step_records_lost"] = 0.01
    if gpu == 0:  # one series a control group
        per_second |= {f"run_pressure_{what}_waiting_seconds": 0.02 for what in ("cpu", "io", "memory")}
        yield Line("gpuwatch_run_memory_limit_bytes", key, 1.8 * 2**40)
        yield Line("gpuwatch_run_memory_used_bytes", key, 2**39)
        if s.STALLED in mix:
            yield Line("gpuwatch_run_oom_kills_total", key, 1)
    for name, rate in per_second.items():
        yield Line(f"gpuwatch_{name}_total", key, rate * (begin_s - job.begin_s), rate * up)
    if stepping:
        for percentile, longer in (("p50", 1.0), ("p95", 1.3)):
            yield Line("gpuwatch_step_percentile_seconds", {**key, "percentile": percentile}, longer * job.step_s)
    yield Line("gpuwatch_run_up", key, up)
    yield Line("gpuwatch_loader_workers", key, 8 * up)
    yield Line("gpuwatch_run_resident_memory_bytes", key, 4e10 * up)


class Fleet:
    """An ASGI application: `/node/N/metrics`, and `/sd` for Prometheus' HTTP service discovery. `now_s`: Unix time."""

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
    import uvicorn

    uvicorn.run(
        fleet, host=host, port=port, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=120
    )
