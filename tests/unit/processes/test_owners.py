"""Who owns a process: control groups as container engines and Slurm write them, and the allowed environment names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.owners import (
    ENVIRONMENT,
    NO_OWNER,
    Owner,
    allowed,
    combine,
    parse_cgroup,
    together,
)

ID = "3f1d2c4b5a69788796a5b4c3d2e1f00112233445566778899aabbccddeeff001"
OTHER_ID = ID[::-1]
UID = "0d6f1c9a-5b1e-4c7b-9d2f-8a1b2c3d4e5f"
SYSTEMD_UID = UID.replace("-", "_")
STATIC_UID = UID.replace("-", "")


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0::/user.slice/user-1000.slice/session-3.scope", Owner()),
        ("0::/", Owner()),
        ("", Owner()),
        (f"0::/system.slice/docker-{ID}.scope", Owner(container_id=ID)),
        (f"12:memory:/docker/{ID}\n3:cpu,cpuacct:/docker/{ID}\n0::/", Owner(container_id=ID)),
        (f"0::/../../docker-{ID}.scope", Owner(container_id=ID)),  # seen from a sibling cgroup namespace
        (
            f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            Owner(container_id=ID),
        ),
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope",
            Owner(container_id=ID, pod_uid=UID),
        ),
        (
            f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{ID}.scope/container",
            Owner(container_id=ID, pod_uid=UID),
        ),
        (f"5:memory:/kubepods/besteffort/pod{UID}/{ID}\n0::/", Owner(container_id=ID, pod_uid=UID)),
        (f"5:memory:/kubepods/pod{UID}/{ID}", Owner(container_id=ID, pod_uid=UID)),
        (f"0::/kubepods/burstable/pod{STATIC_UID}/{ID}", Owner(container_id=ID, pod_uid=STATIC_UID)),
        (
            f"0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}",
            Owner(container_id=ID, pod_uid=UID),
        ),
        (
            f"0::/docker/{OTHER_ID}/kubelet/kubepods/burstable/pod{UID}/{ID}",
            Owner(container_id=ID, pod_uid=UID),
        ),  # a cluster in a container
        ("8:memory:/slurm/uid_1000/job_4711/step_0/task_0\n0::/", Owner(job="4711", step="0")),
        ("8:memory:/slurm_node17/uid_1000/job_4711/step_batch", Owner(job="4711", step="batch")),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_3/user/task_1", Owner(job="4711", step="3")),
        ("0::/system.slice/node17_slurmstepd.scope/job_4711/step_extern/user", Owner(job="4711", step="extern")),
        ("0::/system.slice/slurmstepd.scope/job_4711", Owner(job="4711")),
        ("0::/home/job_4711/step_0", Owner()),  # a folder of that name is not Slurm's
        (f"0::/system.slice/docker-{ID[:40]}.scope", Owner()),
        ("rubbish", Owner()),
    ],
)
def test_control_group(text: str, group: Owner) -> None:
    assert parse_cgroup(text) == group


def test_only_allowed_names_are_read() -> None:
    environ = b"\0".join(
        [
            b"AWS_SECRET_ACCESS_KEY=hunter2",
            b"SLURM_JOB_ID=4711",
            b"SLURM_JOB_ID_SECRET=hunter2",
            b"XSLURM_JOB_ID=hunter2",
            b"POD_NAME=train-0\nforged 1",
            b"POD_NAMESPACE=",
            b"WANDB_API_KEY=SLURM_STEP_ID=9",
            b"CONTAINER_NAME=" + b"x" * 1000,
            b"\xff\xfe=1",
        ]
    )
    assert allowed(environ) == {
        "SLURM_JOB_ID": "4711",
        "POD_NAME": "train-0forged 1",
        "CONTAINER_NAME": "x" * 128,
    }


def test_every_name_that_is_looked_for_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/deploy/agent.md").read_text()
    section = page.partition("## Whose a process is")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z]+_?[A-Z_]*)`", section)) == {n for names in ENVIRONMENT.values() for n in names} | {
        "HOSTNAME"
    }


def test_control_group_is_believed_before_the_environment() -> None:
    """A process sets its own environment as it likes, and not its control group."""
    forged = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "9", "HOSTNAME": "node-17"}
    assert combine("alice", Owner(job="4711", step="0"), forged) == Owner(user="alice", job="4711", step="0")
    assert combine("alice", Owner(job="4711"), forged) == Owner(user="alice", job="4711")
    assert combine("alice", Owner(), forged) == Owner(user="alice", job="1", step="9")


def test_hostname_is_the_pods_name_in_a_pod_alone() -> None:
    variables = {"HOSTNAME": "train-0", "POD_NAMESPACE": "vision"}
    assert combine("", Owner(container_id=ID, pod_uid=UID), variables) == Owner(
        container_id=ID, pod_uid=UID, pod="train-0", namespace="vision"
    )
    assert combine("", Owner(container_id=ID), variables).pod == ""
    assert combine("", Owner(container_id=ID, pod_uid=UID), {**variables, "POD_NAME": "given"}).pod == "given"


def test_several_processes_share_what_they_agree_on() -> None:
    one, two = Owner(user="alice", job="1", pod="p"), Owner(user="alice", job="2")
    assert together([one, two]) == Owner(user="alice", job="shared", pod="p")
    assert together([one, NO_OWNER]) == one
    assert together([]) == NO_OWNER


class Node:
    """A /proc with processes, and their table."""

    def __init__(self, procfs: Path) -> None:
        self.procfs = procfs
        self.book = ProcessTable(procfs)
        self.book.begin_tick()

    def put(self, pid: int, cgroup: str = "0::/", environ: bytes = b"", start: int = 1) -> None:
        directory = self.procfs / str(pid)
        directory.mkdir(exist_ok=True)
        (directory / "stat").write_text(f"{pid} (python) S 1 {'0 ' * 17}{start} 0 0\n")
        (directory / "cgroup").write_text(cgroup)
        (directory / "environ").write_bytes(environ)
        (directory / "cmdline").write_bytes(b"python\0train.py\0--token=hunter2")


def test_process_is_looked_up_once_in_half_a_minute(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.put(7, "0::/system.slice/slurmstepd.scope/job_1/step_0", b"POD_NAME=a")
    first = node.book.owner(7)
    assert (first.job, first.step, first.pod) == ("1", "0", "a")
    assert first.user == node.book.owner(7).user != ""
    node.put(7, "0::/system.slice/slurmstepd.scope/job_2/step_0")
    for _ in range(29):
        node.book.begin_tick()
        assert node.book.owner(7).job == "1"
    node.book.begin_tick()
    assert node.book.owner(7).job == "2"


def test_number_that_is_given_again_is_looked_up_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.put(7, "0::/system.slice/slurmstepd.scope/job_1/step_0")
    assert node.book.owner(7).job == "1"
    node.put(7, "0::/system.slice/slurmstepd.scope/job_2/step_0", start=2)
    node.book.begin_tick()
    assert node.book.owner(7).job == "2"


def test_process_that_is_gone_or_not_to_be_seen_has_no_owner(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.book.owner(7) == NO_OWNER
    (tmp_path / "8").mkdir()
    assert node.book.owner(8) == Owner(user=node.book.owner(8).user)


def test_own_environment_through_the_kernels_own_file() -> None:
    """This process's /proc: no error, its user, and no more of its environment than is allowed."""
    owner = ProcessTable(Path("/proc")).owner(os.getpid())
    assert owner.user != ""
    assert os.environ["PATH"] not in repr(owner)
