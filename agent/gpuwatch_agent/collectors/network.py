"""Bytes over the node's network interfaces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, read_text

_LAYERED = re.compile(
    r"lo$"
    r"|veth|docker|br-|br\d|virbr|cni|cbr|cali|cilium|lxc|flannel|kube-|nodelocaldns|podman"  # containers' and bridges
    r"|vxlan|geneve|tun|tap|wg|sit|gre|erspan|ip6|ip_vti|ifb|dummy|bond|team"  # tunnels, and interfaces made of others
    r"|.*\.\d+$"  # VLANs
)
"""Interfaces whose bytes never leave the node, or are counted on the interface below as well."""


@dataclass(frozen=True)
class InterfaceCounters:
    """One network interface since it came up, in bytes."""

    received_bytes: int
    sent_bytes: int


def parse_net_dev(text: str) -> dict[str, InterfaceCounters]:
    """Return the counters of every interface in /proc/net/dev, as in "  eth0: 410 8 0 0 0 0 0 0 420 4 0 0 0 0 0 0".

    Source: proc_pid_net(5): eight columns received, then eight sent, each beginning with the bytes. Two head lines go
    before. Raises: ValueError for odd text.
    """
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        columns = rest.split()
        if not name or len(columns) < 9:
            raise ValueError(f"net/dev: not as in proc_pid_net(5): {line!r}")
        counters[name.strip()] = InterfaceCounters(int(columns[0]), int(columns[8]))
    return counters


def is_physical(name: str) -> bool:
    """Return whether an interface's bytes count once: True for "eth0" (a container's too), False for "veth12ab"."""
    return _LAYERED.match(name) is None


class NetworkCollector:
    """gpuwatch_network_receive_bytes_total and gpuwatch_network_transmit_bytes_total."""

    name = "network"

    def __init__(self, roots: Roots) -> None:
        # /proc/net is the reader's own network namespace; process 1's is the node's where the agent is in a container
        # with the node's /proc, and the same as the reader's elsewhere
        self._paths = (roots.procfs / "1" / "net" / "dev", roots.procfs / "net" / "dev")

    def collect(self) -> Iterable[Sample]:
        """Return the bytes over each interface. Raises: NoData where there is none but the loopback."""
        interfaces = {name: c for name, c in parse_net_dev(self._read()).items() if is_physical(name)}
        if not interfaces:
            raise NoData("this node has no network interface of its own")
        samples = []
        for name, counters in interfaces.items():
            samples += [
                Sample("gpuwatch_network_receive_bytes_total", counters.received_bytes, (name,)),
                Sample("gpuwatch_network_transmit_bytes_total", counters.sent_bytes, (name,)),
            ]
        return samples

    def _read(self) -> str:
        first, second = self._paths
        try:
            return read_text(first)
        except (NoData, PermissionError):
            return read_text(second)
