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
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.c_library import built

_SOURCE = Path(__file__).with_name("nvml.c")
_RECORDED = Path(__file__).parents[1] / "fixtures" / "nvml"
_SCRIPT_VARIABLE = "GPUWATCH_FAKE_NVML"
MIB = 1 << 20

_KEYS = {
    "uuid": ("device",),
    "name": ("name",),
    "pci_bus_id": ("pci",),
    "minor": ("minor", "nvmlDeviceGetMinorNumber"),
    "memory_total_bytes": ("memory_total", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    "memory_used_bytes": ("memory_used", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    "memory_reserved_bytes": ("memory_reserved", "nvmlDeviceGetMemoryInfo_v2"),
    "utilization_percent": ("utilization", "nvmlDeviceGetUtilizationRates"),
    "power_mw": ("power_mw", "nvmlDeviceGetPowerUsage"),
    "energy_mj": ("energy_mj", "nvmlDeviceGetTotalEnergyConsumption"),
    "temperature_celsius": ("temperature", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"),
    "event_reasons": (
        "event_reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ),
    "clock_sm_mhz": ("clock_sm", "nvmlDeviceGetClockInfo"),
    "clock_memory_mhz": ("clock_memory", "nvmlDeviceGetClockInfo"),
    "pcie_generation": ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    "pcie_lanes": ("pcie_lanes", "nvmlDeviceGetCurrPcieLinkWidth"),
    "pcie_replays": ("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
    "ecc_corrected": ("ecc_corrected", "nvmlDeviceGetTotalEccErrors"),
    "ecc_uncorrected": ("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors"),
    "nvlinks": ("nvlinks", "nvmlDeviceGetNvLinkState"),
    "nvlink_errors": ("nvlink_errors", "nvmlDeviceGetNvLinkErrorCounter"),
    "nvlink_transmit_kib": ("nvlink_tx_kib", "nvmlDeviceGetFieldValues"),
    "nvlink_receive_kib": ("nvlink_rx_kib", "nvmlDeviceGetFieldValues"),
}
_LISTS = {
    "xids": ("nvmlDeviceRegisterEvents",),
    "mig": ("nvmlDeviceGetMigMode",),
    "processes": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
}
"""A field of FakeGpu: its key in the script, and the functions that are not supported where it is None."""


@functools.cache
def recording(machine: str) -> Mapping[str, Any]:
    """Return a recorded machine: the content of its file in tests/fixtures/nvml."""
    found: dict[str, Any] = json.loads((_RECORDED / f"{machine}.json").read_text())
    return found


def recordings() -> list[tuple[str, str]]:
    """Return every recorded (machine, state)."""
    machines = sorted(path.stem for path in _RECORDED.glob("*.json"))
    return [(machine, state) for machine in machines for state in recording(machine)["states"]]


def _figures(machine: str, state: str) -> dict[str, Any]:
    """Return FakeGpu's fields for a recorded GPU; what is N/A there or not recorded is None."""
    found = recording(machine)
    gpu, seen = found["gpu"], found["states"][state]
    same = ("temperature_celsius", "event_reasons", "pcie_generation", "pcie_lanes", "pcie_replays", "nvlinks")
    figures = {name: seen.get(name) for name in (*same, "utilization_percent", "ecc_corrected", "ecc_uncorrected")}
    for name in ("total", "used", "reserved"):
        figures[f"memory_{name}_bytes"] = _times(seen.get(f"memory_{name}_mib"), MIB)
    for field_name in ("mig", "processes"):
        figures[field_name] = None if seen.get(field_name) is None else tuple(map(tuple, seen[field_name]))
    if figures["mig"]:
        figures["mig"] = tuple((i, profile, used * MIB, total * MIB) for i, profile, used, total in figures["mig"])
    if figures["processes"]:
        figures["processes"] = tuple((pid, used * MIB) for pid, used in figures["processes"])
    return {
        **figures,
        "name": gpu["name"],
        "pci_bus_id": gpu["pci_bus_id"],
        "minor": gpu.get("minor"),
        "power_mw": _times(seen.get("power_watts"), 1000),
        "clock_sm_mhz": seen.get("sm_clock_mhz"),
        "clock_memory_mhz": seen.get("memory_clock_mhz"),
    }


def _times(value: float | None, factor: int) -> int | None:
    return None if value is None else round(value * factor)


_H100 = _figures("h100", "load")


@dataclass(frozen=True)
class FakeGpu:
    """What NVML says of a GPU, in NVML's units. None: not supported. The defaults are the recorded H100 at work.

    What no recording has (energy, XIDs, GPM, NVLink's counters) begins at 0 or empty.
    """

    uuid: str = "GPU-00000000-0000-4000-8000-000000000000"
    name: str = _H100["name"]
    pci_bus_id: str = _H100["pci_bus_id"]
    minor: int | None = _H100["minor"]
    memory_total_bytes: int | None = _H100["memory_total_bytes"]
    memory_used_bytes: int | None = _H100["memory_used_bytes"]
    memory_reserved_bytes: int | None = _H100["memory_reserved_bytes"]
    """None: a driver from before the second version of the call."""
    utilization_percent: int | None = _H100["utilization_percent"]
    power_mw: int | None = _H100["power_mw"]
    energy_mj: int | None = 0
    temperature_celsius: int | None = _H100["temperature_celsius"]
    event_reasons: int | None = _H100["event_reasons"]
    """nvmlClocksEventReason* bits."""
    processes: tuple[tuple[int, int | None] | tuple[int, int | None, int], ...] | None = ()
    """Compute processes: pid; memory in bytes, None for a driver that does not give it; the index of the MIG device."""
    mps: tuple[int, ...] = ()
    """Clients of an MPS server, which is among the processes."""
    sm_percent: Mapping[int, int] = field(default_factory=dict)
    """Use of the multiprocessors by pid; a process that is missing, or has 0, had no work."""
    clock_sm_mhz: int | None = _H100["clock_sm_mhz"]
    clock_memory_mhz: int | None = _H100["clock_memory_mhz"]
    pcie_generation: int | None = _H100["pcie_generation"]
    pcie_lanes: int | None = _H100["pcie_lanes"]
    pcie_replays: int | None = _H100["pcie_replays"]
    ecc_corrected: int | None = _H100["ecc_corrected"]
    ecc_uncorrected: int | None = _H100["ecc_uncorrected"]
    nvlinks: int | None = _H100["nvlinks"]
    """Links that are up; 0: it has one, which is down."""
    nvlink_errors: int | None = 0
    nvlink_transmit_kib: int | None = 0
    nvlink_receive_kib: int | None = 0
    xids: tuple[int, ...] | None = ()
    """Errors so far, the oldest first: whoever has registered is sent those that come after."""
    gpm: Mapping[int, float] = field(default_factory=dict)
    """Values by NVML_GPM_METRIC_*, in the driver's units; empty: a GPU before Hopper. 16 at most."""
    mig: tuple[tuple[int, str, int, int] | tuple[int, str, int, int, str], ...] | None = ()
    """Compute instances: id of the GPU instance, profile, bytes used, bytes in all, UUID.

    The UUID is by default "MIG-", the GPU's UUID and the index. Any: MIG is on, and the calls that MIG rules out are
    not supported. None: a GPU that cannot be split.
    """
    mig_activity: Mapping[int, float] = field(default_factory=dict)
    """By index of an instance: its GPM values as a share of the GPU's, half by default."""
    lost: bool = False
    """It has fallen off the bus: still listed, and every call on it is answered with GPU_IS_LOST."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """NVML_ERROR_* code by function, as in {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED}."""
    hangs_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by function: how long it does not return, or until the script is rewritten without it."""


def recorded(machine: str, state: str, uuid: str = "GPU-0") -> FakeGpu:
    """Return a recorded GPU. What was not recorded is not supported."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("energy_mj", "xids", "nvlink_errors", "nvlink_transmit_kib", "nvlink_receive_kib")
    )
    return FakeGpu(uuid=uuid, **_figures(machine, state), **unknown)


class FakeNvml:
    """An NVML whose GPUs are what was last written. It begins as a driver that is not loaded."""

    def __init__(self, directory: Path) -> None:
        self.library = built(_SOURCE, "libnvidia-ml.so.1")
        self.script = directory / "nvml.script"

    def write(
        self,
        gpus: Sequence[FakeGpu],
        *,
        driver: str = "550.54.15",
        cuda: str = "12.4",
        load: int = 0,
        errors: Mapping[str, int] | None = None,
        hangs_s: Mapping[str, float] | None = None,
    ) -> None:
        """Set what every call from now on answers.

        `errors` and `hangs_s`: as in FakeGpu, for all GPUs and for functions of no GPU (such as nvmlInitWithFlags).
        `load` counts the driver's loads: when it changes, the driver was reloaded, and NVML must be initialised again.
        """
        lines = [f"driver={driver}", f"cuda={cuda}", f"load={load}", *_faults(errors or {}, hangs_s or {})]
        for gpu in gpus:
            for name, (key, *_) in _KEYS.items():
                if (value := getattr(gpu, name)) is not None:
                    lines.append(f"{key}={value}")
            lines += [
                f"lost={int(gpu.lost)}",
                *(f"xid={code}" for code in gpu.xids or ()),
                *(f"gpm={metric} {value!r}" for metric, value in gpu.gpm.items()),
                *(
                    f"mig={number} {used} {total} {profile} {''.join(uuid) or f'MIG-{gpu.uuid}-{index}'}"
                    f" {gpu.mig_activity.get(index, 0.5)!r}"
                    for index, (number, profile, used, total, *uuid) in enumerate(gpu.mig or ())
                ),
                *(
                    f"process={pid} {'-' if used is None else used} {' '.join(map(str, index))}"
                    for pid, used, *index in gpu.processes or ()
                ),
                *(f"mps={pid} {1 << 30}" for pid in gpu.mps),
                *(f"sm={pid} {percent}" for pid, percent in gpu.sm_percent.items()),
                *_faults({**_not_supported(gpu), **gpu.errors}, gpu.hangs_s),
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


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def shut_down() -> None:
    """Shut this process's NVML down, however often it was started."""
    while True:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return


def patch_library(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """Have `pynvml` load this library, whether it has loaded another one before or not; it may be absent."""
    monkeypatch.setattr(pynvml, "CDLL", lambda _name: ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def _not_supported(gpu: FakeGpu) -> dict[str, int]:
    """Return the error by function for each field that is None."""
    functions = {**{name: calls for name, (_, *calls) in _KEYS.items()}, **_LISTS}
    absent = {
        call: pynvml.NVML_ERROR_NOT_SUPPORTED
        for name in functions
        if getattr(gpu, name) is None
        for call in functions[name]
    }
    if gpu.memory_reserved_bytes is None and gpu.memory_total_bytes is not None:
        absent["nvmlDeviceGetMemoryInfo_v2"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    return absent


def _faults(errors: Mapping[str, int], hangs_s: Mapping[str, float]) -> list[str]:
    lines = [f"error.{function}={code}" for function, code in errors.items()]
    return lines + [f"hang.{function}={seconds}" for function, seconds in hangs_s.items()]
