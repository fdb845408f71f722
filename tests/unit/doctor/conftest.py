"""A machine on which nothing is wrong, as directory trees and fakes; each test changes what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.tools.doctor.machine import Machine, NvmlFacts, ask_agent
from tests.unit.doctor.machines import GIB, REQUIREMENTS, VERSIONS, answers, two_gpus, write

METHODS = ("requirements", "folder_of", "limits", "reads", "connects")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """The /proc of a node: this process, and process 1."""
    root = tmp_path / "proc"
    write(
        root,
        {
            "self/cgroup": "0::/job\n",
            "meminfo": "MemTotal:       67108864 kB\nMemFree:        1 kB\n",
            "net/tcp": "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n",
            "1/cmdline": "/sbin/init\0",
            "1/comm": "init\n",
            "1/io": "rchar: 1\n",
            **{
                f"pressure/{what}": "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\n"
                for what in ("cpu", "io", "memory")
            },
        },
    )
    (root / "1/root").symlink_to("/")
    (root / "self/ns").mkdir()
    (root / "self/ns/pid").symlink_to("pid:[4026531836]")
    return root


@pytest.fixture
def machine(tmp_path: Path, proc: Path) -> Callable[..., Machine]:
    """Make a healthy machine: two GPUs, a CUDA torch, no agent, no Prometheus named; keyword arguments change it."""
    for name in ("sys/fs/cgroup/job", "dev", "run", "state", "torch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "torch/version.py").write_text(
        "__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\nhip = None\n"
    )

    def make(**changes: Any) -> Machine:
        versions: Mapping[str, str] = changes.pop("versions", VERSIONS)
        agent = changes.pop("agent", None) or ask_agent("http://127.0.0.1:9478", False, answers({}))
        nvml: NvmlFacts = changes.pop("facts", two_gpus())
        pages: Mapping[str, Any] = changes.pop("pages", {})
        limit: tuple[int, int] = changes.pop("limit", (65536, 65536))
        size, used = changes.pop("disk", (64 * GIB, GIB))
        fields: dict[str, Any] = {
            "environ": {},
            "uid": 0,
            "agent_url": "http://127.0.0.1:9478",
            "prometheus_url": None,
            "history": tmp_path / "state/gpuwatch/history.db",
            "procfs": proc,
            "sysfs": tmp_path / "sys",
            "dev": tmp_path / "dev",
            "shm": tmp_path / "shm",
            "socket_directories": (tmp_path / "run",),
            "python": ("3.11.7", "/usr/bin/python3"),
            "gpuwatch_version": "0.1.0",
            "requirements": lambda: REQUIREMENTS,
            "folder_of": lambda package: tmp_path / package,
            "nvml": lambda: nvml,
            "agent": lambda: agent,
            "fetch": answers(pages),
            "limits": lambda number: limit,
            "cores": lambda: 8,
            "space": lambda path: (size, used, size - used),
            "reads": lambda path: True,
            "writes": lambda path: True,
            "connects": lambda host, port: False,
        }
        methods = {"version_of": versions.get, **{name: fields.pop(name) for name in METHODS}}
        methods |= {name: changes.pop(name) for name in METHODS if name in changes}
        host = Machine(**{**fields, **changes})
        for name, method in methods.items():
            setattr(host, name, method)
        return host

    return make
