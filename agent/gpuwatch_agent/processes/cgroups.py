"""What a process's control group says of its owner: container, pod, Slurm job and step. Pure parsing of /proc/PID/cgroup."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ID = r"[0-9a-f]{64}"
_CONTAINER = re.compile(rf"(?:^|[-/:])({_ID})(?:\.scope)?(?=/|$)")
"""Docker: /docker/ID, docker-ID.scope; containerd: cri-containerd-ID.scope or /kubepods/…/ID; CRI-O: crio-ID.scope; podman:
libpod-ID.scope. crio-conmon-ID is the process beside a container, and never one that trains."""
_POD = re.compile(r"[-/]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)")
"""kubelet: /kubepods/burstable/podUID (cgroupfs) or kubepods-burstable-podUID.slice, its dashes as underscores (systemd).
A static pod's UID is 32 digits."""
_JOB = re.compile(r"/job_(\d+)(?=/|$)(?:/step_([\w.+]+))?")
"""Slurm: /slurm/uid_UID/job_ID/step_ID/task_N (v1), …slurmstepd.scope/job_ID/step_ID/user/task_N (v2)."""


@dataclass(frozen=True)
class Group:
    """The owner as the control group tells it; empty: not told."""

    container_id: str = ""
    """64 hexadecimal digits."""
    pod_uid: str = ""
    """With dashes, as `kubectl` shows it."""
    job: str = ""
    """Slurm's job id."""
    step: str = ""
    """Slurm's step: a number, "batch", "extern" or "interactive"."""


def parse_cgroup(text: str) -> Group:
    """Return what the paths in /proc/PID/cgroup say, the innermost first (a pod of a cluster in a container).

    Source: cgroups(7): lines of `hierarchy:controllers:path`, one a controller in v1, `0::path` in v2.
    """
    container = pod = job = step = ""
    for line in text.splitlines():
        path = line.split(":", 2)[2] if line.count(":") >= 2 else ""
        container = container or _last(_CONTAINER, path)
        pod = pod or _last(_POD, path)
        if "slurm" in path and not job:
            found = _JOB.search(path)
            job, step = (found.group(1), found.group(2) or "") if found else ("", "")
    return Group(container, pod.replace("_", "-"), job, step)


def cgroup_paths(text: str) -> tuple[str | None, dict[str, str]]:
    """Return (path in the unified hierarchy, path by v1 controller); None where the process is in no unified one."""
    unified: str | None = None
    controllers: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and not parts[1]:
            unified = parts[2]
        for controller in filter(None, parts[1].split(",")):
            controllers[controller] = parts[2]
    return unified, controllers


def _last(pattern: re.Pattern[str], path: str) -> str:
    found = pattern.findall(path)
    return found[-1] if found else ""
