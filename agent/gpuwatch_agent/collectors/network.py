"""Bytes over the node's network interfaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.base import Roots, psutil_at

_LAYERED = re.compile(
    r"lo$"
    r"|veth|docker|br-|br\d|virbr|cni|cbr|cali|cilium|lxc|flannel|kube-|nodelocaldns|podman"  # containers' and bridges
    r"|vxlan|geneve|tun|tap|wg|sit|gre|erspan|ip6|ip_vti|ifb|dummy|bond|team"  # tunnels, and interfaces made of others
    r"|.*\.\d+$"  # VLANs
)
"""Interfaces whose bytes never leave the node, or are counted on the interface below as well."""


def is_physical(name: str) -> bool:
    """Return whether an interface's bytes count once: True for "eth0" (a container's too), False for "veth12ab"."""
    return _LAYERED.match(name) is None


class NetworkCollector:
    """gpuwatch_network_receive_bytes_total and gpuwatch_network_transmit_bytes_total."""

    name = "network"

    def __init__(self, roots: Roots) -> None:
        # /proc/net is the reader's own network namespace; process 1's is the node's where the agent is in a container
        # with the node's /proc, and the same as the reader's elsewhere
        self._places = (roots.procfs / "1", roots.procfs)

    def collect(self) -> Iterable[Sample]:
        """Return the bytes over each interface. Raises: NoData where there is none but the loopback."""
        interfaces = {name: c for name, c in self._read().items() if is_physical(name)}
        if not interfaces:
            raise NoData("this node has no network interface of its own")
        samples = []
        for name, counters in interfaces.items():
            samples += [
                Sample("gpuwatch_network_receive_bytes_total", counters.bytes_recv, (name,)),
                Sample("gpuwatch_network_transmit_bytes_total", counters.bytes_sent, (name,)),
            ]
        return samples

    def _read(self) -> Mapping[str, Any]:
        first, second = self._places
        try:
            with psutil_at(first):
                return psutil.net_io_counters(pernic=True, nowrap=False)
        except (NoData, PermissionError):
            with psutil_at(second):
                return psutil.net_io_counters(pernic=True, nowrap=False)
