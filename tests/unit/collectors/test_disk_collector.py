from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host.proc import is_disk
from gpuwatch_agent.collectors.node import disk


def test_values(node, values):
    """Two disks: no partition, no loop device, and no md0 or dm-0, whose bytes the disks below them have counted."""
    assert values(partial(disk, node)) == {
        ("gpuwatch_disk_read_bytes_total", "nvme0n1"): 4643973 * 512,
        ("gpuwatch_disk_written_bytes_total", "nvme0n1"): 39451633 * 512,
        ("gpuwatch_disk_io_time_seconds_total", "nvme0n1"): 222.766,
        ("gpuwatch_disk_read_bytes_total", "sda"): 1003346126 * 512,
        ("gpuwatch_disk_written_bytes_total", "sda"): 505697032 * 512,
        ("gpuwatch_disk_io_time_seconds_total", "sda"): 9653.88,
    }


@pytest.mark.parametrize(
    "name",
    ["loop0", "ram1", "zram0", "fd0", "sr0", "dm-3", "md127", "bcache0", "drbd1", "nvme0c1n1", "sda1", "nvme0n1p2"],
)
def test_not_a_disk(name):
    assert not is_disk(name)


@pytest.mark.parametrize("name", ["sda", "sdaa", "vda", "xvdf", "nvme10n1", "mmcblk0", "nbd0", "dasda", "pmem0"])
def test_a_disk(name):
    assert is_disk(name)


def test_a_slash_in_a_name(bare, values):
    """HP's old controllers."""
    bare.procfs.mkdir(parents=True)
    (bare.procfs / "diskstats").write_text("104 0 cciss/c0d0 1 0 2 3 4 0 6 7 0 1500 9\n")
    assert values(partial(disk, bare)) == {
        ("gpuwatch_disk_read_bytes_total", "cciss/c0d0"): 1024,
        ("gpuwatch_disk_written_bytes_total", "cciss/c0d0"): 3072,
        ("gpuwatch_disk_io_time_seconds_total", "cciss/c0d0"): 1.5,
    }


def test_odd_text(bare, values):
    bare.procfs.mkdir(parents=True)
    (bare.procfs / "diskstats").write_text("8 0 sda a b c d e f g h i j k\n")
    with pytest.raises(ValueError):
        values(partial(disk, bare))


def test_no_file(bare, values):
    with pytest.raises(NoData, match="diskstats does not exist"):
        values(partial(disk, bare))


def test_no_disk(bare, values):
    bare.procfs.mkdir(parents=True)
    (bare.procfs / "diskstats").write_text("7 0 loop0 20 0 160 1 0 0 0 0 0 1 1\n")
    with pytest.raises(NoData, match="no disk"):
        values(partial(disk, bare))
