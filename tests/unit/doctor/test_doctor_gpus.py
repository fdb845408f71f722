"""Driver, visible GPUs, pid namespace, ptrace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.tools.doctor.gpus import driver, visible, visible_gpus
from gpuwatch.tools.doctor.limits import pid_namespace, ptrace
from gpuwatch.tools.doctor.machine import Machine, NvmlFacts
from tests.unit.doctor.machines import two_gpus, write

MakeMachine = Callable[..., Machine]
UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


def test_no_driver_is_expected_where_there_is_no_device(machine: MakeMachine) -> None:
    for state in ("no library", "not loaded", "no module"):
        assert driver(machine(facts=NvmlFacts(state))).status == "skipped"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "files", "found", "remedy"),
    [
        ("no library", {"dev/nvidia0": ""}, "/dev/nvidia0, and no libnvidia-ml.so.1", "modprobe nvidia"),
        ("no library", {"dev/nvidia0": "", "proc/driver/nvidia/version": "550"}, "a loaded driver", "--gpus all"),
        ("not loaded", {"sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n"}, "the driver is not loaded", "modprobe"),
        ("no module", {"dev/nvidia0": ""}, "nvidia-ml-py is not installed", "pip install nvidia-ml-py"),
    ],
)
def test_a_device_without_a_driver_is_a_problem(
    machine: MakeMachine, tmp_path: Path, state: Any, files: dict[str, str], found: str, remedy: str
) -> None:
    host = machine(facts=NvmlFacts(state))
    write(tmp_path, {**files, "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n"})
    outcome = driver(host)
    assert outcome.status == "problem"
    assert found in outcome.found and outcome.remedy and remedy in outcome.remedy


def test_other_pci_devices_promise_no_gpu(machine: MakeMachine, tmp_path: Path) -> None:
    host = machine(facts=NvmlFacts("no library"))
    for name, vendor, kind in (("a", "0x10de", "0x040300"), ("b", "0x8086", "0x030000")):
        write(tmp_path / "sys/bus/pci/devices" / name, {"vendor": vendor, "class": kind})
    assert driver(host).status == "skipped"


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (two_gpus(), "ok", "550.54.15, CUDA 12.4: 2 × NVIDIA H100 80GB HBM3"),
        (two_gpus(lost=("GPU 1: GPU is lost",)), "problem", "lost: GPU 1: GPU is lost"),
        (two_gpus(gpus=()), "warning", "lists no GPU"),
        (NvmlFacts("mismatch", "Driver/library version mismatch"), "problem", "different versions"),
        (NvmlFacts("hangs", "no answer within 2 s"), "problem", "NVML hangs"),
        (NvmlFacts("fails", "Unknown Error"), "problem", "NVML does not start: Unknown Error"),
    ],
)
def test_driver(machine: MakeMachine, facts: NvmlFacts, status: str, words: str) -> None:
    outcome = driver(machine(facts=facts))
    assert outcome.status == status and words in outcome.found


def test_a_driver_that_starts_slowly_is_to_be_kept_running_before_a_reboot_is_advised(machine: MakeMachine) -> None:
    """Without persistence mode each first program initialises all GPUs, which takes seconds."""
    remedy = driver(machine(facts=NvmlFacts("hangs", "no answer within 2 s"))).remedy or ""
    assert 0 < remedy.find("nvidia-smi -pm 1") < remedy.find("reboot")


def test_a_container_without_a_gpu_has_a_remedy(machine: MakeMachine) -> None:
    outcome = driver(machine(facts=two_gpus(gpus=()), environ={"NVIDIA_VISIBLE_DEVICES": "void"}))
    assert outcome.status == "warning" and outcome.remedy and "--gpus all" in outcome.remedy


@pytest.mark.parametrize(
    ("value", "seen", "wrong"),
    [
        ("0,1,2", 3, ""),
        ("1", 1, ""),
        (" 2 , 0", 2, ""),
        ("", 0, ""),
        ("-1", 0, ""),
        ("0,-1,1", 1, ""),
        ("0,7,1", 1, "'7' is no GPU"),
        ("1,1", 0, "listed twice"),
        ("GPU-ab,GPU-cc33", 2, ""),
        ("GPU-a", 0, "fits several"),
        ("GPU-zz,0", 0, "'GPU-zz' is no GPU"),
        ("0 1", 0, "'0 1' is no GPU"),
        ("MIG-1,MIG-2", 2, ""),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(value: str, seen: int, wrong: str) -> None:
    count, why = visible(value, UUIDS)
    assert count == seen
    assert (wrong in why) if wrong else why == ""


def test_visible_gpus(machine: MakeMachine) -> None:
    assert visible_gpus(machine()).found == "all 2 (CUDA_VISIBLE_DEVICES is not set)"
    assert visible_gpus(machine(environ={"CUDA_VISIBLE_DEVICES": "1"})).status == "ok"
    assert visible_gpus(machine(environ={"CUDA_VISIBLE_DEVICES": ""})).status == "problem"
    cut = visible_gpus(machine(environ={"CUDA_VISIBLE_DEVICES": "0,2"}))
    assert cut.status == "problem" and "1 of 2 GPUs are visible; '2' is no GPU" in cut.found
    assert visible_gpus(machine(facts=NvmlFacts("no library"))).status == "skipped"
    assert visible_gpus(machine(facts=two_gpus(gpus=()))).status == "skipped"


def container(proc: Path) -> None:
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026532999]")


def test_pid_namespace_of_the_node(machine: MakeMachine, proc: Path) -> None:
    assert pid_namespace(machine()).status == "ok"
    (proc / "self/ns/pid").unlink()
    assert pid_namespace(machine()).status == "skipped"


def test_pid_namespace_of_a_container_is_a_problem_for_an_agent_alone(machine: MakeMachine, proc: Path) -> None:
    container(proc)
    training = pid_namespace(machine())
    assert training.status == "warning" and "fine for training" in training.found
    write(proc, {"7/cmdline": "/usr/bin/python3\0-m\0gpuwatch_agent\0--http\0"})
    agent = pid_namespace(machine())
    assert agent.status == "problem" and agent.remedy and "pid: host" in agent.remedy


def test_ptrace(machine: MakeMachine, proc: Path) -> None:
    def refuses(path: Path) -> bool:
        return False

    somebody = (proc / "1").stat().st_uid + 1
    assert ptrace(machine(uid=somebody)).found == "processes of other users can be read"
    apparmor = ptrace(machine(uid=somebody, reads=refuses))
    assert apparmor.status == "warning" and apparmor.remedy and "apparmor=unconfined" in apparmor.remedy
    assert ptrace(machine(uid=somebody, reads=lambda path: path.name == "io")).status == "warning"
    assert ptrace(machine(uid=somebody - 1)).status == "skipped"
    write(proc, {"sys/kernel/yama/ptrace_scope": "1\n"})
    refused = ptrace(machine(uid=somebody, reads=refuses))
    assert refused.status == "warning" and refused.remedy and "SYS_PTRACE" in refused.remedy
    assert refused.found.endswith("yama ptrace_scope 1: py-spy needs root")
