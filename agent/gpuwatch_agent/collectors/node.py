"""Collectors that read the kernel's files: CPU, load, pressure, memory, /dev/shm, disks, network, InfiniBand, agent."""

import contextlib
import errno
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from gpuwatch.config import AgentSettings
from gpuwatch.errors import NoData
from gpuwatch.host import proc
from gpuwatch.metrics import Sample
from gpuwatch.tables import table

DEFAULTS = AgentSettings()
_NAMES = table("gpuwatch_agent.collectors", "node.yml")


@dataclass(frozen=True)
class Roots:
    """Mount points of the kernel's file systems; different in a container or a test."""

    procfs: Path = Path(DEFAULTS.procfs)
    sysfs: Path = Path(DEFAULTS.sysfs)
    shm: Path = Path(DEFAULTS.shm)


def read_text(path: Path) -> str:
    """Return a kernel file's text.

    Raises: NoData where the file is absent, or is there but belongs to a feature that the kernel was booted without
    (opening /proc/pressure/* gives EOPNOTSUPP under psi=0); OSError for every other failure.
    """
    try:
        return proc.text_in(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoData(f"{path} does not exist here") from None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise NoData(f"{path}: the kernel has this switched off") from None


_LARGEST_STEP_BACK_S = 3.0


def never_back(last: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return `now` with small steps back held at the last value.

    Idle and iowait are computed from two clocks and do go back a little (proc_stat(5) says so of iowait); a counter
    that decreases reads as a restart. A large step back is a real restart, that of a migrated container, and passes.
    """
    return {
        mode: last[mode] if 0 < last.get(mode, value) - value <= _LARGEST_STEP_BACK_S else value
        for mode, value in now.items()
    }


class CpuCollector:
    """CPU time by mode, and the number of online cores. Source: `/proc/stat`."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._last: dict[str, float] = {}

    def collect(self) -> Iterable[Sample]:
        """Return the CPU time of the node since boot. Raises: NoData without /proc/stat."""
        times = proc.parse_cpu_times(read_text(self._roots.procfs / "stat"))
        self._last = never_back(self._last, times.seconds)
        samples = [Sample("gpuwatch_cpu_seconds_total", value, (mode,)) for mode, value in self._last.items()]
        return [*samples, Sample("gpuwatch_cpu_cores", times.cores)] if times.cores else samples


def load(roots: Roots) -> Iterable[Sample]:
    """Return the load average, and the tasks that run or wait for a CPU. Source: `/proc/loadavg`."""
    # "0.20 0.18 0.12 1/80 11206": 1 of 80 tasks runs or waits, proc_loadavg(5). /proc/stat has it too, but costs more:
    # it adds up every interrupt of every core.
    load1, _, _, tasks, _ = read_text(roots.procfs / "loadavg").split()
    running, _ = tasks.split("/")
    return [Sample("gpuwatch_load1", float(load1)), Sample("gpuwatch_procs_running", int(running))]


def pressure(roots: Roots) -> Iterable[Sample]:
    """Return how long some or all tasks waited for CPU, I/O and memory. Source: `/proc/pressure`.

    Raises: NoData where the kernel has no PSI (CONFIG_PSI, psi=1).
    """
    folder, samples = roots.procfs / "pressure", []
    for resource, names in _NAMES["pressure"].items():
        with contextlib.suppress(NoData):
            totals = proc.parse_pressure(read_text(folder / resource))
            for line in names.keys() & totals.keys():
                metric = f"gpuwatch_pressure_{resource}_{names[line]}_seconds_total"
                samples.append(Sample(metric, totals[line]))
    if not samples:
        raise NoData(f"{folder}: this kernel has no pressure information (boot it with psi=1)")
    return samples


def memory(roots: Roots) -> Iterable[Sample]:
    """Return total memory, and what the kernel estimates to be available without swapping. Source: `/proc/meminfo`."""
    sizes = proc.parse_kib(read_text(roots.procfs / "meminfo"))
    names = {"MemTotal": "gpuwatch_memory_total_bytes", "MemAvailable": "gpuwatch_memory_available_bytes"}
    if missing := names.keys() - sizes.keys():
        raise NoData(f"{roots.procfs / 'meminfo'} has no entry {', '.join(sorted(missing))}")
    return [Sample(metric, sizes[name]) for name, metric in names.items()]


def shm(roots: Roots) -> Iterable[Sample]:
    """Return size and use of the node's own /dev/shm: loader workers send batches through it. Source: `statvfs`."""
    size, used = proc.shm_bytes(roots.shm)
    return [Sample("gpuwatch_shm_size_bytes", size, ("host",)), Sample("gpuwatch_shm_used_bytes", used, ("host",))]


def disk(roots: Roots) -> Iterable[Sample]:
    """Yield bytes read and written, and the busy time, of every whole disk. Source: `/proc/diskstats`.

    Raises: NoData on a node without a disk (booted from the network, say).
    """
    for name, counts in proc.parse_disks(read_text(roots.procfs / "diskstats")).items():
        yield Sample("gpuwatch_disk_read_bytes_total", counts.read_bytes, (name,))
        yield Sample("gpuwatch_disk_written_bytes_total", counts.written_bytes, (name,))
        yield Sample("gpuwatch_disk_io_time_seconds_total", counts.busy_s, (name,))


COUNTED_ELSEWHERE = re.compile(
    r"lo$"
    r"|veth|docker|br-|br\d|virbr|cni|cbr|cali|cilium|lxc|flannel|kube-|nodelocaldns|podman"  # containers' and bridges
    r"|(eni|gke|azv)[0-9a-f]{11}$|ov[ns]-"  # a pod's end on EKS, GKE and AKS; Open vSwitch's own
    r"|vxlan|genev|tun|tap|wg|sit|gre|erspan|ip6|ip_vti|ifb|dummy|bond|team"  # tunnels, and interfaces made of others
    r"|.*\.\d+$"  # VLANs
)
"""Interfaces whose bytes never leave the node, or are counted on the one below too. A container's eth0 is none."""


def network(roots: Roots) -> Iterable[Sample]:
    """Yield the bytes received and sent on each physical interface. Source: `/proc/1/net/dev`.

    Raises: NoData where there is none but the loopback.
    """
    try:  # process 1's namespace is the node's, also where the agent runs in a container with the node's /proc
        text = read_text(roots.procfs / "1/net/dev")
    except (NoData, PermissionError):
        text = read_text(roots.procfs / "net/dev")
    counted = proc.parse_network(text).items()
    interfaces = {name: counts for name, counts in counted if not COUNTED_ELSEWHERE.match(name)}
    if not interfaces:
        raise NoData("this node has no network interface but virtual ones")
    for name, (received, sent) in interfaces.items():
        yield Sample("gpuwatch_network_receive_bytes_total", received, (name,))
        yield Sample("gpuwatch_network_transmit_bytes_total", sent, (name,))


def infiniband(roots: Roots) -> Iterable[Sample]:
    """Return data, symbol errors and lost links of InfiniBand and RoCE ports. Source: `/sys/class/infiniband`.

    RDMA traffic is on no network interface's counters. See Documentation/ABI/stable/sysfs-class-infiniband.
    Raises: NoData on a node without a port.
    """
    folder = roots.sysfs / "class" / "infiniband"
    if not folder.is_dir():
        raise NoData(f"{folder} does not exist here: no InfiniBand or RoCE")
    samples = []
    for port, (file, (metric, unit)) in product(sorted(folder.glob("*/ports/*")), _NAMES["infiniband"].items()):
        with contextlib.suppress(NoData, OSError):  # EINVAL from a port that is down, on some drivers
            text = read_text(port / "counters" / file).strip()
            if text.isdigit():  # not "N/A (no PMA)"
                samples.append(Sample(metric, int(text) * unit, (port.parents[1].name, port.name)))
    if not samples:
        raise NoData(f"{folder} lists no port with counters")
    return samples


def agent_process(roots: Roots) -> Iterable[Sample]:
    """Yield the CPU time of all the agent's threads, and its resident memory. Source: `/proc/self/stat`."""
    yield Sample("gpuwatch_agent_cpu_seconds_total", time.process_time())
    with contextlib.suppress(NoData):  # another pid namespace's /proc, in which the agent is not
        yield Sample("gpuwatch_agent_resident_memory_bytes", proc.stat("self", roots.procfs).resident_bytes)


COLLECTORS = (CpuCollector, load, pressure, memory, shm, disk, network, infiniband, agent_process)
"""All of them, in the order in which they run. Their docstrings are their rows in docs/deploy/agent.md."""
