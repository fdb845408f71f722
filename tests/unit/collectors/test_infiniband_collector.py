from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.node import infiniband


def test_values(node, values):
    """Two ports that count, one of them not all; a third whose driver has no counters. The unit is four bytes."""
    prefix = "gpuwatch_infiniband_"
    assert values(partial(infiniband, node)) == {
        (f"{prefix}port_data_received_bytes_total", "mlx5_0", "1"): 4_000_000,
        (f"{prefix}port_data_transmitted_bytes_total", "mlx5_0", "1"): 10_000_000,
        (f"{prefix}symbol_errors_total", "mlx5_0", "1"): 0,
        (f"{prefix}link_downed_total", "mlx5_0", "1"): 2,
        (f"{prefix}port_data_transmitted_bytes_total", "mlx5_1", "1"): 28,
    }


def test_node_without_infiniband(bare):
    with pytest.raises(NoData, match="no InfiniBand or RoCE"):
        infiniband(bare)


def test_node_whose_ports_count_nothing(bare):
    (bare.sysfs / "class/infiniband/siw0/ports/1/counters").mkdir(parents=True)
    with pytest.raises(NoData, match="lists no port with counters"):
        infiniband(bare)
