"""Bytes over InfiniBand and RoCE ports, by node_exporter's names. RDMA traffic is on no network interface's counters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.node import OfNode, read_text

_BYTES = {
    "port_rcv_data": "gpuwatch_infiniband_port_data_received_bytes_total",
    "port_xmit_data": "gpuwatch_infiniband_port_data_transmitted_bytes_total",
}
"""The specification counts four lanes' octets together: the unit is four bytes."""
_ERRORS = {
    "symbol_error": "gpuwatch_infiniband_symbol_errors_total",
    "link_downed": "gpuwatch_infiniband_link_downed_total",
}


def parse_rate(text: str) -> float:
    """Return a port's rate in bytes a second, as in "400 Gb/sec (4X NDR)". Raises: ValueError for odd text."""
    fields = text.split()
    if len(fields) < 2 or fields[1] != "Gb/sec":
        raise ValueError(f"rate: not as in sysfs-class-infiniband: {text.strip()!r}")
    return float(fields[0]) * 1e9 / 8


def parse_counter(text: str) -> int | None:
    """Return a counter; None for a port that keeps none ("N/A (no PMA)")."""
    return int(text) if text.strip().isdigit() else None


class InfinibandCollector(OfNode):
    """The gpuwatch_infiniband_* metrics. Source: Documentation/ABI/stable/sysfs-class-infiniband."""

    name = "infiniband"

    def collect(self) -> Iterable[Sample]:
        """Return the counters of every port. Raises: NoData on a node without InfiniBand or RoCE."""
        folder = self.roots.sysfs / "class" / "infiniband"
        try:
            devices = sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            raise NoData(f"{folder} does not exist here: no InfiniBand or RoCE") from None
        samples = [s for device in devices for port in _ports(device) for s in _port_samples(port, device.name)]
        if not samples:
            raise NoData(f"{folder} lists no port that counts")
        return samples


def _ports(device: Path) -> list[Path]:
    try:
        return sorted((device / "ports").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _port_samples(port: Path, device: str) -> list[Sample]:
    labels, samples = (device, port.name), []
    for names, factor in ((_BYTES, 4), (_ERRORS, 1)):
        for file, metric in names.items():
            try:
                count = parse_counter(read_text(port / "counters" / file))
            except (NoData, OSError):  # EINVAL from a port that is down, on some drivers
                continue
            if count is not None:
                samples.append(Sample(metric, count * factor, labels))
    with contextlib.suppress(NoData, OSError):
        samples.append(
            Sample("gpuwatch_infiniband_rate_bytes_per_second", parse_rate(read_text(port / "rate")), labels)
        )
    return samples
