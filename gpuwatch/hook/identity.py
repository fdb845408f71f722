"""A training process's run, rank, job and pid: from the environment, /proc and, once initialised, torch.distributed."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import replace

from gpuwatch.errors import pass_on
from gpuwatch.host import proc

MAX_NAME = 128

_ASKED_AT_MOST = 120  # times, twice a second, that a rank of several nodes asks for the run's id
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_RUN_KEY = "gpuwatch/run"

_JOB = ("GPUWATCH_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NAMESPACE = "var/run/secrets/kubernetes.io/serviceaccount/namespace"
_FIRST_POD = re.compile(r"(.+)-(?:master|worker)-0(?:\..*)?")
SLURM_TASKS_HERE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")  # the second: only with --ntasks-per-node
LOCAL_WORLD_SIZE = ("LOCAL_WORLD_SIZE", *SLURM_TASKS_HERE, "OMPI_COMM_WORLD_LOCAL_SIZE")


class Identity(msgspec.Struct, frozen=True):
    """What names a process among all others, and its place in a distributed run."""

    run: str  # unique, shared by all ranks of a run
    job: str  # what all attempts share: GPUWATCH_JOB, the scheduler's or torchrun's id, Kubernetes' name; else empty
    rank: int
    world_size: int
    local_world_size: int
    pid: int
    process_start_ticks: int  # clock ticks since boot (/proc/PID/stat field 22); 0 where not known
    pid_namespace: int  # inode of the pid namespace; 0 where not known
    boot_id: str
    host: str


def sendable(name: object) -> str:
    """Return a name as sent: cut, "?" for what cannot be printed, and for the dots of "." and "..": never URL parts."""
    text = "".join(each if each.isprintable() else "?" for each in str(name)[:MAX_NAME])
    return text.replace(".", "?") if text in (".", "..") else text


def identify(
    environ: Mapping[str, str] = os.environ, procfs: Path = Path("/proc"), launcher: int | None = None
) -> Identity:
    """Return who this process is. Source: the environment; /proc/self/stat, proc(5).

    `run` is GPUWATCH_RUN, else the scheduler's or torchelastic's id, else what the ranks of a node share by the process
    that launched them (torchrun, or the parent whose pid is `launcher`), else host + pid + start time.
    """
    host = socket.gethostname()
    start_ticks = _start_ticks(procfs)
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    job = next(filter(None, (environ.get(name, "").strip() for name in _JOB)), "" if elastic == "none" else elastic)
    if job and job == environ.get("LSB_JOBID") and (index := integer(environ, ("LSB_JOBINDEX",), 0)):
        job += f"[{index}]"  # of a job array, as bjobs shows it: LSF gives all of its elements one id
    job = job or _kubernetes_job(environ, host, procfs)
    run = _declared_run(environ) or _launched_run(environ, host, procfs, launcher)
    run = run or f"{host}-{os.getpid()}-{start_ticks}"
    return Identity(
        run=sendable(run),
        job=sendable(job),
        rank=integer(environ, _RANK, 0),
        world_size=max(1, integer(environ, _WORLD_SIZE, 1)),
        local_world_size=max(1, integer(environ, LOCAL_WORLD_SIZE, 1)),
        pid=os.getpid(),
        process_start_ticks=start_ticks,
        pid_namespace=proc.pid_namespace("self", procfs),
        boot_id=proc.boot_id(procfs),
        host=host[:MAX_NAME],
    )


def script_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return a run's default name: the script's; if it is a package's, such as Ray's, that of `gpuwatch run`."""
    script = Path(sys.argv[0] if sys.argv else "")
    if script.name == "__main__.py" and script.parent.name:  # `python -m package`
        script = script.parent
    name = (environ.get("GPUWATCH_AUTO_SCRIPT") if "site-packages" in script.parts else None) or script.name
    return name[:MAX_NAME] if name not in ("", "-c", "-m") else "python"


def _kubernetes_job(environ: Mapping[str, str], host: str, procfs: Path) -> str:
    """Return "namespace/job" in a pod of an Indexed Job or of Kubeflow's PyTorchJob; empty elsewhere.

    An Indexed Job's pod that trains alone keeps its index. Sources: kubernetes.io, "Jobs": a hostname is
    $(job-name)-$(index); training-operator, genGeneralName: MASTER_ADDR is JOB-master-0.
    """
    first, index = _FIRST_POD.fullmatch(environ.get("MASTER_ADDR", "")), environ.get("JOB_COMPLETION_INDEX", "")
    job = "" if first is None else first[1]
    if index.isdigit() and host.endswith(f"-{index}"):
        job = host.removesuffix(f"-{index}") if integer(environ, _WORLD_SIZE, 1) > 1 else host
    if not job or not environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    namespace = environ.get("POD_NAMESPACE") or proc.text_of(procfs.parent / _NAMESPACE)
    return f"{namespace.strip()}/{job}" if namespace else job


def _declared_run(environ: Mapping[str, str]) -> str:
    """Return the run's id as the environment names it, the same for all ranks on all nodes; empty where it does not."""
    if declared := environ.get("GPUWATCH_RUN", "").strip():
        return declared
    if slurm := environ.get("SLURM_JOB_ID"):
        step = environ.get("SLURM_STEP_ID")
        return f"slurm-{slurm}" + (f".{step}" if step else "")
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"elastic-{elastic}" if elastic not in ("", "none") else ""


def _launched_run(environ: Mapping[str, str], host: str, procfs: Path, launcher: int | None) -> str:
    """Return the id that a node's ranks share by their parent: torchrun, which may name no run, or `launcher`."""
    if "TORCHELASTIC_RUN_ID" in environ and integer(environ, _WORLD_SIZE, 1) > 1:
        parent = os.getppid()
        return f"{host}-{parent}-{_start_ticks(procfs, str(parent))}"
    if launcher is None:
        return ""
    port = environ.get("MASTER_PORT", "")
    return f"{host}-{launcher}-{_start_ticks(procfs, str(launcher))}" + (f"-{port}" if port.isdigit() else "")


def integer(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Return the first number in these variables: of SLURM_STEP_TASKS_PER_NODE "8(x2),4" that of the first node."""
    found = (re.match(r"[0-9]+", environ.get(name, "")) for name in names)
    return next((int(number[0]) for number in found if number), default)


def _start_ticks(procfs: Path, process: str = "self") -> int:
    return found.start_ticks if (found := proc.optional(proc.stat, process, procfs)) is not None else 0


class Membership:
    """A process's identity, fixed by its first step: from the environment, or torch.distributed once initialised."""

    def __init__(self, suffix: str = "", forked: bool = False, environ: Mapping[str, str] = os.environ) -> None:
        """`suffix` distinguishes a process's second run; `forked`: its parent has a run, whose id it must not take."""
        self._suffix = suffix
        self._environ = environ
        self._settled = False
        own = f"-fork{os.getpid()}" if forked else ""
        who = identify(environ)
        self._run = who.run  # without the suffix
        self._asked = 0
        self._agreed = bool(_declared_run(environ))
        self.identity = _suffixed(who, own + suffix)

    def update(self, stepping: bool, stepped: bool, ask: bool = False) -> bool:
        """Update the identity; return whether a run may be published. `ask`: this thread may wait for the network.

        A child of multiprocessing's may be a rank or a worker: it publishes nothing before a step is seen or
        torch.distributed is initialised.
        """
        if self._settled and self._agreed:
            return True
        if not self._settled:
            world = torch_world()
            if world is not None and world[1] > 1:
                self.identity = self._in_world(*world)
            self._settled = stepped or world is not None
        if ask and not self._agreed:
            self._agree()
        others = "TORCHELASTIC_RUN_ID" in self._environ or (self._has_own_id and torch_world() is not None)
        if not self._agreed and self._asks_store and others:
            return False  # the other ranks are known to come
        return self._settled or stepping or parent_pid() is None

    def stop_asking(self) -> None:
        """Publish under the present id: the process ends."""
        self._agreed = True

    @property
    def _has_own_id(self) -> bool:
        """Whether nothing gives the ranks of this node one id, as with Ray."""
        return self._run.endswith(f"-{self.identity.pid}-{self.identity.process_start_ticks}")

    @property
    def _asks_store(self) -> bool:
        """Whether ranks may have other ids: on other nodes, as far as the launcher's variables show, or on this one."""
        here = 1 if self._has_own_id else integer(self._environ, ("LOCAL_WORLD_SIZE",), 1)
        return self.identity.world_size > here

    def _agree(self) -> None:
        self._asked += 1
        found, world = None, torch_world()
        self._agreed = self._asked >= _ASKED_AT_MOST
        if world is None or not self._asks_store:
            self._agreed |= self._settled
            return
        try:
            found = _agreed_run(world[0], self._run)
        except Exception as error:  # no store, or one that is torn down meanwhile
            pass_on(error)
            self._agreed = True
        if found is not None:
            self._agreed = True
            self.identity = _suffixed(replace(self.identity, run=found), self._suffix)

    def _in_world(self, rank: int, world_size: int) -> Identity:
        who = identify(self._environ, launcher=parent_pid())
        here = world_size if self._environ.get("MASTER_ADDR", "") in _LOOPBACK else who.local_world_size
        self._run = who.run
        return _suffixed(replace(who, rank=rank, world_size=world_size, local_world_size=here), self._suffix)


def _agreed_run(rank: int, own: str) -> str | None:
    """Return the id that rank 0 sets, as its own, in torch.distributed's store for all ranks; None while it is not set.

    Called by the background thread only, as it may use the network. Raises: whatever the store does, or without one.
    """
    store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
    if rank == 0:
        store.set(_RUN_KEY, own)
        return own
    return str(store.get(_RUN_KEY).decode()) if store.check([_RUN_KEY]) else None


def _suffixed(who: Identity, suffix: str) -> Identity:
    return replace(who, run=who.run[: MAX_NAME - len(suffix)] + suffix)


def torch_world() -> tuple[int, int] | None:
    """Return (rank, world size) of torch.distributed's default group; None while there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
            return (rank, world_size) if 0 <= rank < world_size else None
    except Exception as error:  # still being imported, or torn down meanwhile
        pass_on(error)
    return None


def parent_pid() -> int | None:
    """Return the pid of the process that made this one by multiprocessing, None for any other process."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    return None if parent is None else parent.pid


torch_steps = SimpleNamespace(seen=False)  # whether an optimizer of torch has made a step in this process


def asynchronous_framework() -> str | None:
    """Return what computes asynchronously: "jax:cpu", "jax:tpu" …, "tensorflow" off the CPU; None if torch trains."""
    if torch_steps.seen:
        return None
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None:
        initialized = getattr(bridge, "backends_are_initialized", None)
        if initialized is None:
            return "jax"
        if initialized():
            jax: Any = sys.modules["jax"]
            platform = str(jax.default_backend())
            if platform == "gpu":
                platform = "rocm" if "rocm" in str(jax.devices()[0].client.platform_version).lower() else "cuda"
            return f"jax:{platform}"
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if context is None or not getattr(context, "_initialized", True):
        return None
    devices = getattr(context, "_logical_devices", None)
    return None if devices and all(device.device_type == "CPU" for device in devices) else "tensorflow"
