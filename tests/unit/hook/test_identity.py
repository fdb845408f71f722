"""Who a training process is, from environments as schedulers make them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuwatch.hook.identity import identify, script_name

STAT = "4711 (python (x) y) S " + " ".join(str(field) for field in range(4, 22)) + " 987654 0 0"


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "stat").write_text(STAT)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    (tmp_path / "sys" / "kernel" / "random").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "random" / "boot_id").write_text("0000-1111\n")
    return tmp_path


def test_a_process_of_its_own(procfs: Path) -> None:
    who = identify({}, procfs)
    assert who.run == f"{who.host}-{os.getpid()}-987654"
    assert (who.rank, who.world_size, who.local_world_size, who.job) == (0, 1, 1, "")
    assert (who.process_start_ticks, who.boot_id) == (987654, "0000-1111")
    assert who.pid_namespace == (procfs / "self" / "ns" / "pid").stat().st_ino


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({"GPUWATCH_RUN": " mine ", "SLURM_JOB_ID": "9"}, "mine"),
        ({"SLURM_JOB_ID": "9"}, "slurm-9"),
        ({"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "2"}, "slurm-9.2"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "elastic-abc"),
        ({"GPUWATCH_RUN": "x" * 500}, "x" * 128),
        ({"GPUWATCH_RUN": "a\nb\u202e\udcffü 😀"}, "a?b??ü 😀"),
        ({"GPUWATCH_RUN": "."}, "?"),  # in a URL it is the folder itself
        ({"GPUWATCH_RUN": ".."}, "??"),
        ({"GPUWATCH_RUN": "v1..2"}, "v1..2"),
    ],
)
def test_a_run_id_that_all_ranks_share(procfs: Path, environ: dict[str, str], run: str) -> None:
    assert identify(environ, procfs).run == run


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAMESPACE": "vision"}


@pytest.mark.parametrize(
    ("host", "environ", "job"),
    [
        ("train-3", {**POD, "JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "8"}, "vision/train"),
        ("train-3", {**POD, "JOB_COMPLETION_INDEX": "3"}, "vision/train-3"),  # it trains alone
        ("train-13", {**POD, "JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "8"}, ""),  # a node's name: hostNetwork
        ("train-master-0", {**POD, "MASTER_ADDR": "train-master-0", "WORLD_SIZE": "2"}, "vision/train"),
        ("train-worker-1", {**POD, "MASTER_ADDR": "train-worker-0.vision.svc", "WORLD_SIZE": "2"}, "vision/train"),
        ("train-worker-0", {**POD, "MASTER_ADDR": "localhost"}, ""),
        ("train-worker-1", {"MASTER_ADDR": "train-master-0"}, ""),  # no pod
        ("train-3", {**POD, "JOB_COMPLETION_INDEX": "3", "GPUWATCH_JOB": "mine"}, "mine"),
        ("train-3", {**POD, "JOB_COMPLETION_INDEX": "3", "TORCHELASTIC_RUN_ID": "llm"}, "llm"),
        ("train-3", {**POD, "JOB_COMPLETION_INDEX": "3", "TORCHELASTIC_RUN_ID": "none"}, "vision/train-3"),
    ],
)
def test_the_job_of_a_pod(
    procfs: Path, monkeypatch: pytest.MonkeyPatch, host: str, environ: dict[str, str], job: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert identify(environ, procfs).job == job


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"LSB_JOBID": "123", "LSB_JOBINDEX": "0"}, "123"),
        ({"LSB_JOBID": "123", "LSB_JOBINDEX": "40"}, "123[40]"),
        ({"LSB_JOBID": "123", "LSB_JOBINDEX": "40", "GPUWATCH_JOB": "mine"}, "mine"),
        ({"LSB_JOBID": "123", "LSB_JOBINDEX": ""}, "123"),
        ({"PBS_JOBID": "123[40].server"}, "123[40].server"),
        ({"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}, "4713"),
    ],
)
def test_each_element_of_a_job_array_is_a_job(procfs: Path, environ: dict[str, str], job: str) -> None:
    assert identify(environ, procfs).job == job


def test_a_pod_s_namespace_is_in_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "train-0")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}
    assert identify(environ, tmp_path / "proc").job == "train"
    mounted = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount"
    mounted.mkdir(parents=True)
    (mounted / "namespace").write_text("team-a")
    assert identify(environ, tmp_path / "proc").job == "team-a/train"


def test_torchrun_without_an_id_gives_the_ranks_of_a_node_its_own(procfs: Path) -> None:
    parent = procfs / str(os.getppid())
    parent.mkdir()
    (parent / "stat").write_text(STAT.replace("987654", "5555"))
    launched = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    for rank in ("0", "7"):
        who = identify({**launched, "RANK": rank}, procfs)
        assert who.run == f"{who.host}-{os.getppid()}-5555"
    two_nodes = identify({**launched, "WORLD_SIZE": "16", "RANK": "9"}, procfs)
    assert two_nodes.run == who.run, "each node's ranks are one run: nothing tells two nodes that they belong together"
    alone = identify({**launched, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, procfs)
    assert alone.run == f"{alone.host}-{os.getpid()}-987654"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 4)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, (3, 4, 4)),
        # srun -n16 -N2: --ntasks-per-node was not given
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, (3, 16, 8)),
        # srun -n1 --exact, in a batch script with --ntasks-per-node=8
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"},
            (0, 1, 1),
        ),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "many"}, (0, 1, 1)),
        ({"WORLD_SIZE": "0"}, (0, 1, 1)),
    ],
)
def test_the_place_in_a_distributed_run(procfs: Path, environ: dict[str, str], expected: tuple[int, ...]) -> None:
    who = identify(environ, procfs)
    assert (who.rank, who.world_size, who.local_world_size) == expected


def test_without_proc_what_is_not_known_is_zero_or_empty(tmp_path: Path) -> None:
    who = identify({}, tmp_path)
    assert (who.process_start_ticks, who.pid_namespace, who.boot_id) == (0, 0, "")


@pytest.mark.parametrize(("argv", "name"), [("/a/train.py", "train.py"), ("-c", "python"), ("", "python")])
def test_a_run_is_named_after_its_script(monkeypatch: pytest.MonkeyPatch, argv: str, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [argv])
    assert script_name() == name
    assert script_name({"GPUWATCH_AUTO_SCRIPT": "job.py"}) == name


def test_a_run_in_a_process_that_a_package_starts_is_named_after_the_script_of_gpuwatch_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py"])
    assert script_name({"GPUWATCH_AUTO_SCRIPT": "train.py"}) == "train.py"
    assert script_name({}) == "default_worker.py"


@pytest.mark.parametrize("place", ["/home/a/resnet/__main__.py", "/v/lib/python3.11/site-packages/resnet/__main__.py"])
def test_a_package_that_is_run_by_m_names_the_run(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were "__main__.py"."""
    monkeypatch.setattr("sys.argv", [place])
    assert script_name({}) == "resnet"
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    assert script_name({}) == "__main__.py"
