from __future__ import annotations

import os
from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host import proc
from gpuwatch_agent.collectors.node import shm


def statvfs(blocks: int, free: int) -> os.statvfs_result:
    """A file system whose blocks are counted in 4,096 bytes, though its preferred transfer is larger."""
    return os.statvfs_result((1 << 20, 4096, blocks, free, free // 2, 0, 0, 0, 0, 255))


def test_values(node, values, monkeypatch):
    """Docker's 64 MiB, of which 60 MiB are used."""
    asked = []
    monkeypatch.setattr(proc.os, "statvfs", lambda path: asked.append(path) or statvfs(16384, 1024))
    assert values(partial(shm, node)) == {
        ("gpuwatch_shm_size_bytes", "host"): 64 << 20,
        ("gpuwatch_shm_used_bytes", "host"): 60 << 20,
    }
    assert asked == [node.shm]


def test_no_mount(bare, values):
    with pytest.raises(NoData, match="shm: No such file"):
        values(partial(shm, bare))


def test_a_mount_without_a_limit_has_no_size(node, values, monkeypatch):
    monkeypatch.setattr(proc.os, "statvfs", lambda path: statvfs(0, 0))
    with pytest.raises(NoData, match="no size limit"):
        values(partial(shm, node))
