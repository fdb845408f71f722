"""The owner of a process: user, container, pod, job. From /proc/PID, its control group, and an allow-list of environment variables.

Other variables are not kept, and command lines are never read.
"""

import pwd
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

_ID = r"[0-9a-f]{64}"
_CONTAINER = re.compile(rf"(?:^|[-/:])({_ID})(?:\.scope)?(?=/|$)")
"""Docker: /docker/ID, docker-ID.scope; containerd: cri-containerd-ID.scope or /kubepods/…/ID; CRI-O: crio-ID.scope; podman:
libpod-ID.scope. crio-conmon-ID is the container's monitor process, and never one that trains."""
_POD = re.compile(r"[-/]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)")
"""kubelet: /kubepods/burstable/podUID (cgroupfs) or kubepods-burstable-podUID.slice, its dashes as underscores (systemd).
A static pod's UID is 32 digits."""
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
    """Return the innermost container, pod and job in the paths of /proc/PID/cgroup.

    Source: cgroups(7): lines of `hierarchy:controllers:path`, one per controller in v1, `0::path` in v2.
    """
    container = pod = job = step = ""
    for line in text.splitlines():
        path = line.split(":", 2)[2] if line.count(":") >= 2 else ""
        container = container or _last(_CONTAINER, path)
        pod = pod or _last(_POD, path)
        if "slurm" in path and not job:
            found = _JOB.search(path)
            job, step = (found.group(1), found.group(2) or "") if found else ("", "")
    return Owner(job=job, step=step, container_id=container, pod_uid=pod.replace("_", "-"))


def _last(pattern: re.Pattern[str], path: str) -> str:
    found = pattern.findall(path)
    return found[-1] if found else ""


SHARED = "shared"

ENVIRONMENT = {
    "job": ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    "step": ("SLURM_STEP_ID",),
    "namespace": ("POD_NAMESPACE",),
    "pod": ("POD_NAME",),
    "container": ("CONTAINER_NAME",),
}
"""Variables read from a process's environment; the first one that is set counts. The control group's job has precedence: a process can set
its environment, but not its group. POD_* and CONTAINER_NAME: a pod's use of the downward API."""
POD_HOSTNAME = "HOSTNAME"  # read in a pod only, where the kubelet sets it to the pod's name
_NAMES = frozenset(name for names in ENVIRONMENT.values() for name in names) | {POD_HOSTNAME}
_MOST_ENVIRONMENT = 1 << 20
_MOST_TEXT = 128
_GOOD_FOR_S = 30.0
_USER_GOOD_FOR_S = 600.0


def allowed(environ: bytes) -> dict[str, str]:
    """Return the allow-listed variables of an environment as the kernel shows it. Source: /proc/PID/environ, proc(5)."""
    found: dict[str, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        text = name.decode("ascii", "replace")
        if text in _NAMES and value:
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
    if len(several) == 1:
        return several[0]
    values = {name: sorted({getattr(owner, name) for owner in several} - {""}) for name in Owner.__struct_fields__}
    return Owner(**{name: found[0] if len(found) == 1 else (SHARED if found else "") for name, found in values.items()})


class OwnerCache:
    """Owners of processes by pid, each read at most every 30 s."""

    def __init__(self, procfs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._procfs = procfs
        self._clock = clock
        self._known: dict[int, tuple[int, float, Owner]] = {}  # (uid, when it was read, owner)
        self._requested: dict[int, tuple[int, float, Owner]] = {}  # of these, what this tick has requested
        self._user = lru_cache(_user)

    def owner(self, pid: int) -> Owner:
        """Return a process's owner; `NO_OWNER` for one that is gone or not readable."""
        directory = self._procfs / str(pid)
        try:
            status = directory.stat()
        except OSError:
            return NO_OWNER
        now_s = self._clock()
        known = self._known.get(pid)
        if known is None or known[0] != status.st_uid or now_s - known[1] >= _GOOD_FOR_S:
            group = parse_cgroup(_read(directory / "cgroup").decode("utf-8", "replace"))
            user = self._user(status.st_uid, now_s // _USER_GOOD_FOR_S)
            known = (status.st_uid, now_s, combine(user, group, allowed(_read(directory / "environ"))))
        self._known[pid] = self._requested[pid] = known
        return known[2]

    def begin_tick(self) -> None:
        """Drop those not requested in the last tick: a reused pid is another process."""
        self._known, self._requested = self._requested, {}


def _user(uid: int, period: float) -> str:
    """Return a user's name, or number. Cached for a period: the user database may be across a network."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read(path: Path) -> bytes:
    """Return a file's first MiB; nothing for one that is gone, or that belongs to another user."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_ENVIRONMENT)
    except OSError:
        return b""
