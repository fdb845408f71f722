"""GPUs on a machine without one: a library with NVML's ABI, scripted from a file, that the real `pynvml` loads.

    nvml = FakeNvml(tmp_path)
    nvml.write([FakeGpu(utilization_percent=97, processes=((4711, 2 << 30),))])
    subprocess.Popen([...], env=nvml.environment())     # the process sees one GPU
    nvml.write([])                                      # and now it has fallen off the bus

`nvml.c` is compiled once by the system's C compiler (`cc`, or `$CC`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pynvml
import pytest

_SOURCE = Path(__file__).with_name("nvml.c")
_SCRIPT_VARIABLE = "GPUWATCH_FAKE_NVML"


@dataclass(frozen=True)
class FakeGpu:
    """What NVML says of a GPU, in NVML's units. The defaults are a training GPU at work."""

    uuid: str = "GPU-00000000-0000-4000-8000-000000000000"
    name: str = "NVIDIA H100 80GB HBM3"
    pci_bus_id: str = "00000000:01:00.0"
    minor: int = 0
    memory_total_bytes: int = 80 << 30
    memory_used_bytes: int = 20 << 30
    memory_reserved_bytes: int = 512 << 20
    utilization_percent: int = 97
    power_mw: int = 612_500
    energy_mj: int = 7_200_250
    temperature_celsius: int = 61
    event_reasons: int = 0
    """nvmlClocksEventReason* bits."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """Compute processes: pid and memory in bytes, None for a driver that does not tell it."""
    clock_sm_mhz: int = 1980
    clock_memory_mhz: int = 2619
    pcie_generation: int = 5
    pcie_lanes: int = 16
    pcie_replays: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    nvlinks: int = 0
    """Links that are up; without any the calls are not supported."""
    nvlink_errors: int = 0
    nvlink_transmit_kib: int = 0
    nvlink_receive_kib: int = 0
    xids: tuple[int, ...] = ()
    """Errors so far, the oldest first: whoever has registered is told of those that come after."""
    gpm: Mapping[int, float] = field(default_factory=dict)
    """Values by NVML_GPM_METRIC_*, in the driver's units; empty: a GPU before Hopper. 16 at most."""
    mig: tuple[tuple[int, str, int, int], ...] = ()
    """MIG instances: id, profile, bytes used, bytes in all. Any: MIG is on."""
    lost: bool = False
    """It has fallen off the bus: still listed, and every call on it is answered with GPU_IS_LOST."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """NVML_ERROR_* code by function, as in {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED}."""
    hangs_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by function: how long it does not return, or until the script is rewritten without it."""


class FakeNvml:
    """An NVML whose GPUs are what was last written. It begins as a driver that is not loaded."""

    def __init__(self, directory: Path) -> None:
        self.library = build_library()
        self.script = directory / "nvml.script"

    def write(
        self,
        gpus: Sequence[FakeGpu],
        *,
        driver: str = "550.54.15",
        load: int = 0,
        errors: Mapping[str, int] | None = None,
        hangs_s: Mapping[str, float] | None = None,
    ) -> None:
        """Set what every call from now on answers.

        `errors` and `hangs_s`: as in FakeGpu, for all GPUs and for functions that concern none (nvmlInitWithFlags, say).
        `load` counts the driver's loads: another number than before is a reload, after which NVML must be started anew.
        """
        lines = [f"driver={driver}", f"load={load}", *_faults(errors or {}, hangs_s or {})]
        for gpu in gpus:
            lines += [
                f"device={gpu.uuid}",
                f"name={gpu.name}",
                f"pci={gpu.pci_bus_id}",
                f"minor={gpu.minor}",
                f"memory_total={gpu.memory_total_bytes}",
                f"memory_used={gpu.memory_used_bytes}",
                f"memory_reserved={gpu.memory_reserved_bytes}",
                f"utilization={gpu.utilization_percent}",
                f"power_mw={gpu.power_mw}",
                f"energy_mj={gpu.energy_mj}",
                f"temperature={gpu.temperature_celsius}",
                f"event_reasons={gpu.event_reasons}",
                f"clock_sm={gpu.clock_sm_mhz}",
                f"clock_memory={gpu.clock_memory_mhz}",
                f"pcie_generation={gpu.pcie_generation}",
                f"pcie_lanes={gpu.pcie_lanes}",
                f"pcie_replays={gpu.pcie_replays}",
                f"ecc_corrected={gpu.ecc_corrected}",
                f"ecc_uncorrected={gpu.ecc_uncorrected}",
                f"nvlinks={gpu.nvlinks}",
                f"nvlink_errors={gpu.nvlink_errors}",
                f"nvlink_tx_kib={gpu.nvlink_transmit_kib}",
                f"nvlink_rx_kib={gpu.nvlink_receive_kib}",
                f"lost={int(gpu.lost)}",
                *(f"xid={code}" for code in gpu.xids),
                *(f"gpm={metric} {value!r}" for metric, value in gpu.gpm.items()),
                *(f"mig={number} {used} {total} {profile}" for number, profile, used, total in gpu.mig),
                *(f"process={pid} {'-' if used is None else used}" for pid, used in gpu.processes),
                *_faults(gpu.errors, gpu.hangs_s),
            ]
        new = self.script.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.script)

    def unload(self) -> None:
        """Unload the driver: every call is answered with DRIVER_NOT_LOADED."""
        self.script.unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to see these GPUs: this one's, and where the library lies."""
        path = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, path)),
            _SCRIPT_VARIABLE: str(self.script),
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process's `pynvml` load the library, until the test is over."""
        monkeypatch.setenv(_SCRIPT_VARIABLE, str(self.script))
        patch_library(monkeypatch, self.library)


def patch_library(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """Have `pynvml` load this library, whether it has loaded another one before or not; it may be absent."""
    monkeypatch.setattr(pynvml, "CDLL", lambda _name: ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


@functools.cache
def build_library() -> Path:
    """Return libnvidia-ml.so.1, compiled at the first use of this source by this user."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gpuwatch-fake-nvml-{os.getuid()}" / digest / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            command = [
                os.environ.get("CC", "cc"),
                "-std=gnu11",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-shared",
                "-fPIC",
            ]
            subprocess.run([*command, f"-Wl,-soname,{library.name}", "-o", built, _SOURCE, "-lpthread"], check=True)
            built.replace(library)  # two test runs may build it at once
    return library


def _faults(errors: Mapping[str, int], hangs_s: Mapping[str, float]) -> list[str]:
    lines = [f"error.{function}={code}" for function, code in errors.items()]
    return lines + [f"hang.{function}={seconds}" for function, seconds in hangs_s.items()]
