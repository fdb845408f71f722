"""GpuAllocatedUnused from a real agent: which job or pod has a GPU, and the alert that it raises.

The allocations come from a folder and from a kubelet.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch_agent.collectors.drivers import GpuDevice
from gpuwatch_agent.gpus.allocations import (
    _ACK,
    _DATA,
    _END_STREAM,
    _PADDED,
    _PING,
    AllocationWatch,
    _frame,
    read_kubelet,
)
from tests.integration.agent_process import Agent, Trainer
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.pod_resources import Devices, Kubelet, kubelet
from tests.servers import hastened, prometheus_config, start_prometheus, wait_for

pytest.importorskip("jh2", reason="the kubelet of these tests needs an HTTP/2 server: pip install jh2")
ASKED_S = 45
"""The agent asks its sources and lists processes every ten seconds; a busy machine takes longer."""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Kubelet]:
    with kubelet(tmp_path / "kubelet.sock") as server:
        yield server


def agent_at(tmp_path: Path, nvml: FakeNvml) -> Agent:
    sources = ("--allocations", str(tmp_path / "allocations"), "--pod-resources", str(tmp_path / "kubelet.sock"))
    return Agent(tmp_path, *sources, environment=nvml.environment())


def gpu(number: int, *pids: int) -> FakeGpu:
    processes = tuple((pid, 1 << 30) for pid in pids)
    return FakeGpu(uuid=f"GPU-{number}", minor=number, utilization_percent=0, processes=processes)


def owner(agent: Agent, number: int) -> dict[str, str]:
    names = ("run", "rank", "user", "job", "namespace", "pod", "container")
    key = next(k for k in agent.metrics() if k[0] == "gpuwatch_gpu_owner_info" and k[2] == f"GPU-{number}")
    return {name: value for name, value in zip(names, key[3:], strict=True) if value}


def states(agent: Agent) -> list[str]:
    return [each["state"] for each in agent.get("/api/v1/status")["gpus"]]


def test_alert_fires_for_a_job_without_a_process_and_resolves_when_it_works(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(0), gpu(1)])
    folder = tmp_path / "allocations"
    folder.mkdir()
    job = {"gpus": ["1"], "job": "4711", "user": "alice", "account": "vision"}
    (folder / "slurm-4711.json").write_text(json.dumps(job))
    rules = hastened(render(AlertThresholds(processless_for_s=2, keep_firing_for_s=0)))
    worker = None
    try:
        with agent_at(tmp_path, nvml) as agent:
            wait_for("the allocation is known", lambda: states(agent) == ["free", "allocated_unused"], ASKED_S)
            assert owner(agent, 1) == {"user": "alice", "job": "4711"} and owner(agent, 0) == {}
            text = agent.get("/api/v1/status")["gpus"][1]["owner"]
            assert text == "allocated to user alice, job 4711, account vision"
            config = prometheus_config({"gpuwatch": agent.url.removeprefix("http://")})
            with start_prometheus(tmp_path / "prometheus", config, rules) as prometheus:
                firing = 'ALERTS{alertname="GpuAllocatedUnused",alertstate="firing"}'
                (found,) = wait_for("it fires", lambda: prometheus.query(firing), 90)
                labels = found["metric"]
                assert (labels["gpu"], labels["user"], labels["job_id"]) == ("1", "alice", "4711")
                (alert,) = (
                    each
                    for each in prometheus.get("/api/v1/alerts")["data"]["alerts"]
                    if each["labels"]["alertname"] == "GpuAllocatedUnused"
                )
                assert alert["annotations"]["owner"] == "user alice, job 4711"
                assert "24.0 GPU-hours a day" in alert["annotations"]["cost"]
                worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                nvml.write([gpu(0), gpu(1, worker.pid)])
                wait_for("it resolves", lambda: not prometheus.query(firing), 90)
            assert owner(agent, 1)["job"] == "4711"  # of its process too
            (folder / "slurm-4711.json").unlink()
            wait_for("the job is over", lambda: "job" not in owner(agent, 1), ASKED_S)
            seconds = {
                k[3]: v for k, v in agent.metrics().items() if k[:3] == ("gpuwatch_gpu_seconds_total", "1", "GPU-1")
            }
            assert seconds["allocated_unused"] > 2 and seconds["unallocated"] < 15
    finally:
        if worker is not None:
            worker.kill()
            worker.wait(10)


def test_a_cancelled_job_is_no_lost_run_and_a_process_that_dies_in_its_job_is(tmp_path: Path) -> None:
    """Both processes are killed, as scancel does; the epilog of one job removes its file."""
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(0), gpu(1)])
    (folder := tmp_path / "allocations").mkdir()
    for number, job in enumerate(("7", "8")):
        (folder / f"slurm-{job}.json").write_text(json.dumps({"gpus": [number], "job": job, "user": "alice"}))
    rules = hastened(render(AlertThresholds(telemetry_for_s=25, keep_firing_for_s=0)))
    with (
        agent_at(tmp_path, nvml) as agent,
        Trainer(agent, run="cancelled", environment={"SLURM_JOB_ID": "7"}) as one,
        Trainer(agent, run="died", environment={"SLURM_JOB_ID": "8"}) as other,
    ):
        nvml.write([gpu(0, one.pid), gpu(1, other.pid)])
        config = prometheus_config({"gpuwatch": agent.url.removeprefix("http://")})
        with start_prometheus(tmp_path / "prometheus", config, rules) as prometheus:
            owners = "gpu:gpuwatch_gpu_owner_info:one"
            held = f'count({owners}{{run="cancelled",job_id="7"}} or {owners}{{run="died",job_id="8"}}) == 2'
            wait_for("the GPUs have their runs", lambda: prometheus.query(held), ASKED_S)
            for each in (one, other):
                each.signal(signal.SIGKILL)
                each.process.wait(10)
            nvml.write([gpu(0), gpu(1)])
            (folder / "slurm-7.json").unlink()
            lost = 'ALERTS{alertname="GpuwatchTelemetryLost",alertstate="firing"}'
            (found,) = wait_for("it fires", lambda: prometheus.query(lost), 90)
            assert (found["metric"]["run"], found["metric"]["job_id"]) == ("died", "8")
            assert states(agent) == ["free", "allocated_unused"]
            time.sleep(5)
            assert [each["metric"]["run"] for each in prometheus.query(f"max_over_time({lost}[1m])")] == ["died"]


def test_pod_of_a_gpu_is_known_from_the_kubelet(tmp_path: Path, pods: Kubelet) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([gpu(0), gpu(1)])
    pods.devices = [Devices("vision", "train-0", "trainer", "nvidia.com/gpu", ("GPU-0",))]
    with agent_at(tmp_path, nvml) as agent:
        wait_for("the allocation is known", lambda: states(agent) == ["allocated_unused", "free"], ASKED_S)
        assert owner(agent, 0) == {"namespace": "vision", "pod": "train-0", "container": "trainer"}
        assert set(pods.calls) == {"/v1.PodResourcesLister/List"}
        pods.status = 12  # it is not known any more which GPU is free: after a minute it is reported
        text = "the allocation of GPUs to jobs is unknown: "
        wait_for("the failure is logged", lambda: text in agent.log.read_text(), ASKED_S)
        assert states(agent) == ["allocated_unused", "free"]


def test_large_answer_of_the_kubelet_and_one_that_never_comes(tmp_path: Path, pods: Kubelet) -> None:
    pods.devices = [
        Devices("team", f"pod-{number:05d}", "main", "nvidia.com/gpu", (f"GPU-{number}",)) for number in range(5000)
    ]
    assert read_kubelet(tmp_path / "kubelet.sock", 30) == [each.allocation for each in pods.devices]
    pods.status = 14
    with pytest.raises(OSError, match=r"no answer to /v1\.PodResourcesLister/List"):
        read_kubelet(tmp_path / "kubelet.sock", 30)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        with pytest.raises(TimeoutError):
            read_kubelet(tmp_path / "silent.sock", 0.2)


@contextmanager
def answering(path: Path, answer: bytes, repeated: bool = False) -> Iterator[None]:
    """A socket whose server answers each call with these bytes, once or for as long as they are taken."""

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer)
                    while repeated:
                        connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", _frame(_DATA, _PADDED, 1), _frame(_DATA, _PADDED | _END_STREAM, 1, b"\xff")],
    ids=["HTTP/1.1", "padding of an empty frame", "more padding than bytes"],
)
def test_rubbish_on_the_kubelet_s_socket_is_no_answer_and_raises_nothing(
    tmp_path: Path, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(tmp_path / "kubelet.sock", answer):
        watch = AllocationWatch(tmp_path / "allocations", tmp_path / "kubelet.sock")
        assert watch.tick((GpuDevice(0, "GPU-0", "NVIDIA H100", "00000000:3B:00.0", 0),), 20) == {}
    assert "the allocation of GPUs to jobs is unknown: " in caplog.text


def test_an_answer_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    pings, errors = 500 * _frame(_PING, _ACK, 0, b"12345678"), list[OSError]()

    def call() -> None:
        try:
            read_kubelet(tmp_path / "kubelet.sock", 0.3)
        except OSError as error:
            errors.append(error)

    with answering(tmp_path / "kubelet.sock", pings, repeated=True):
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        caller.join(20)
    assert [type(error) for error in errors] == [TimeoutError]
