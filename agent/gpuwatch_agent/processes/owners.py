"""The owner of a process: user, container, pod, job. From /proc/PID, its control group, and allow-listed variables.

Other environment variables are not kept, and command lines are never read.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpuwatch.host import cgroup
from gpuwatch.host.proc import text_of

_ID = r"[0-9a-f]{64}"
_CONTAINER = re.compile(rf"(?:^|[-/:])({_ID})(?:\.scope)?(?=/|$)")
"""Docker: /docker/ID, docker-ID.scope; containerd: cri-containerd-ID.scope or /kubepods/…/ID; CRI-O: crio-ID.scope;
podman: libpod-ID.scope. crio-conmon-ID is the container's monitor process, and never one that trains."""
_POD = re.compile(r"[-/]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)")
"""kubelet: /kubepods/burstable/podUID (cgroupfs) or kubepods-burstable-podUID.slice, its dashes as underscores
(systemd). A static pod's UID is 32 digits."""
_JOB = re.compile(r"/job_(\d+)(?=/|$)(?:/step_([\w.+]+))?")
"""Slurm: /slurm/uid_UID/job_ID/step_ID/task_N (v1), …slurmstepd.scope/job_ID/step_ID/user/task_N (v2)."""


class Owner(msgspec.Struct, frozen=True):
    """Who a process belongs to; empty: not known."""

    user: str = ""
    job: str = ""
    step: str = ""  # Slurm's step: a number, "batch", "extern" or "interactive"
    container_id: str = ""  # 64 hexadecimal digits
    pod_uid: str = ""  # with dashes, as `kubectl` shows it
    namespace: str = ""
    pod: str = ""
    container: str = ""
    account: str = ""  # the scheduler's, of an allocation


NO_OWNER = Owner()


def parse_cgroup(text: str) -> Owner:
    """Return the innermost container, pod and job in the paths of /proc/PID/cgroup."""
    container = pod = job = step = ""
    for _, path in cgroup.parse(text):
        container = container or "".join(_CONTAINER.findall(path)[-1:])
        pod = pod or "".join(_POD.findall(path)[-1:])
        if "slurm" in path and not job and (found := _JOB.search(path)):
            job, step = found.groups("")
    return Owner(job=job, step=step, container_id=container, pod_uid=pod.replace("_", "-"))


def is_of_job(folder: str) -> bool:
    """Return whether it is the control group of a whole Slurm job or pod; steps and containers have theirs in it."""
    name = f"/{folder}"
    return _JOB.fullmatch(name) is not None or any(found.end() == len(name) for found in _POD.finditer(name))


SHARED = "shared"

ENVIRONMENT = {
    "job": ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "step": ("SLURM_STEP_ID",),
    "namespace": ("POD_NAMESPACE",),
    "pod": ("POD_NAME",),
    "container": ("CONTAINER_NAME",),
}
"""Variables read from a process's environment; the first that is set counts. The control group's job has precedence:
a process can set its environment, but not its group. POD_* and CONTAINER_NAME: a pod's use of the downward API."""
POD_HOSTNAME = "HOSTNAME"  # read in a pod only, where the kubelet sets it to the pod's name
_NAMES = frozenset(name for names in ENVIRONMENT.values() for name in names) | {POD_HOSTNAME}
_MOST_ENVIRONMENT = 1 << 20  # bytes
_MOST_TEXT = 128


def allowed(environ: bytes) -> dict[str, str]:
    """Return the allowed variables of an environment as the kernel shows it. Source: /proc/PID/environ, proc(5)."""
    found: dict[str, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if (text := name.decode("ascii", "replace")) in _NAMES and value:
            found[text] = printable(value.decode("utf-8", "replace")[:_MOST_TEXT])
    return found


def printable(text: str) -> str:
    """Return a text without the characters that are not printable."""
    return "".join(filter(str.isprintable, text))


def combine(user: str, group: Owner, variables: dict[str, str]) -> Owner:
    """Return the owner by a process's user, control group and allowed variables."""

    def first(field: str) -> str:
        return next((variables[name] for name in ENVIRONMENT[field] if variables.get(name)), "")

    return msgspec.structs.replace(
        group,
        user=user,
        job=group.job or first("job"),
        step=group.step if group.job else first("step"),
        namespace=first("namespace"),
        pod=first("pod") or (variables.get(POD_HOSTNAME, "") if group.pod_uid else ""),
        container=first("container"),
    )


def together(owners: Iterable[Owner]) -> Owner:
    """Return the owner of several processes: "shared" where they differ."""
    several = list(owners)
    values = {name: sorted({getattr(owner, name) for owner in several} - {""}) for name in Owner.__struct_fields__}
    return Owner(**{name: found[0] if len(found) == 1 else (SHARED if found else "") for name, found in values.items()})


def read_owner(folder: Path, user: str) -> Owner:
    """Return the owner of a user's process by its folder in /proc, whose files may be hidden or gone."""
    environ = b""
    with suppress(OSError), (folder / "environ").open("rb") as file:
        environ = file.read(_MOST_ENVIRONMENT)
    return combine(user, parse_cgroup(text_of(folder / "cgroup")), allowed(environ))


def user_name(known: dict[int, str], name_of: Callable[[int], str], uid: int) -> str:
    """Return a user's name as the database (`name_of`) has it, else the one `known` before, else the number.

    To be cached: the database may be across a network, or away for a moment.
    """
    with suppress(KeyError):
        known[uid] = name_of(uid)
    return known.get(uid, str(uid))
