from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.node import COUNTED_ELSEWHERE, network

HEAD = "Inter-|   Receive  |  Transmit\n face |bytes  packets|bytes  packets\n"


def test_values(node, values):
    """Of lo, eth0, ib0, docker0, a veth, a bond over eth0 and a VLAN on it, two count, and each once."""
    assert values(partial(network, node)) == {
        ("gpuwatch_network_receive_bytes_total", "eth0"): 68210035552,
        ("gpuwatch_network_transmit_bytes_total", "eth0"): 9315587528,
        ("gpuwatch_network_receive_bytes_total", "ib0"): 10437182923,
        ("gpuwatch_network_transmit_bytes_total", "ib0"): 2851649360,
    }


def test_the_readers_own_namespace_where_process_1_is_not_to_be_seen(bare, values):
    (bare.procfs / "net").mkdir(parents=True)
    (bare.procfs / "net" / "dev").write_text(HEAD + "  eth0: 11 0 0 0 0 0 0 0 22 0 0 0 0 0 0 0\n")
    assert values(partial(network, bare)) == {
        ("gpuwatch_network_receive_bytes_total", "eth0"): 11,
        ("gpuwatch_network_transmit_bytes_total", "eth0"): 22,
    }


@pytest.mark.parametrize(
    "name",
    [
        "lo",
        "veth0a1b",
        "docker0",
        "br-3f2a",
        "br0",
        "virbr0",
        "cni0",
        "cali12",
        "flannel.1",
        "tun0",
        "bond0",
        "eth1.20",
        "eni1a2b3c4d5e6",
        "gke52af144f966",
        "azv0c1d2e3f4a5",
        "genev_sys_6081",
        "ovs-system",
        "ovn-k8s-mp0",
    ],
)
def test_counted_elsewhere(name):
    assert COUNTED_ELSEWHERE.match(name)


@pytest.mark.parametrize(
    "name", ["eth0", "ens5", "enp3s0f1np1", "ib0", "ibp65s0", "wlan0", "hsn0", "eno1", "local0", "broker0"]
)
def test_counted_here(name):
    assert not COUNTED_ELSEWHERE.match(name)


def test_no_file(bare, values):
    with pytest.raises(NoData, match="net/dev does not exist"):
        values(partial(network, bare))


def test_nothing_but_the_loopback(bare, values):
    (bare.procfs / "net").mkdir(parents=True)
    (bare.procfs / "net" / "dev").write_text(HEAD + "    lo: 11 0 0 0 0 0 0 0 11 0 0 0 0 0 0 0\n")
    with pytest.raises(NoData, match="no network interface but virtual ones"):
        values(partial(network, bare))


@pytest.mark.parametrize("line", ["eth0: 1 2 3", "eth0: a 0 0 0 0 0 0 0 b 0 0 0 0 0 0 0"])
def test_odd_text(bare, values, line):
    (bare.procfs / "net").mkdir(parents=True)
    (bare.procfs / "net" / "dev").write_text(HEAD + line + "\n")
    with pytest.raises((ValueError, IndexError)):
        values(partial(network, bare))
