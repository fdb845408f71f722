"""A stand-in for the module `amdsmi` without a GPU.

It has the names, arguments and answers of amdsmi 7.0 as far as gpuwatch uses them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(f"Error code {err_code}")
        self.err_code = err_code


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiClkType(IntEnum):
    GFX = 1
    MEM = 5


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


NOT_SUPPORTED, NOT_INIT, DRIVER_NOT_LOADED = 2, 32, 34


class FakeAmdsmi:
    """MI300X GPUs; `errors` is the code that a function answers with, by (name, index of the GPU) or by name."""

    AmdSmiException = AmdSmiException
    AmdSmiLibraryException = AmdSmiLibraryException
    AmdSmiInitFlags = AmdSmiInitFlags
    AmdSmiClkType = AmdSmiClkType
    AmdSmiTemperatureType = AmdSmiTemperatureType
    AmdSmiTemperatureMetric = AmdSmiTemperatureMetric

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.started = False
        self.errors: dict[Any, int] = {}
        self.calls: list[str] = []
        self.pids: dict[int, list[int]] = {0: [4711]}
        self.activity: dict[str, Any] = {"gfx_activity": 97, "umc_activity": 40, "mm_activity": "N/A"}

    def _enter(self, name: str, handle: int | None = None) -> None:
        self.calls.append(name)
        code = self.errors.get((name, handle), self.errors.get(name))
        if code:
            raise AmdSmiLibraryException(code)
        if not self.started and name not in ("amdsmi_init",):
            raise AmdSmiLibraryException(NOT_INIT)

    def amdsmi_init(self, flag: AmdSmiInitFlags) -> None:
        self._enter("amdsmi_init")
        assert flag is AmdSmiInitFlags.INIT_AMD_GPUS
        self.started = True

    def amdsmi_shut_down(self) -> None:
        self._enter("amdsmi_shut_down")
        self.started = False

    def amdsmi_get_processor_handles(self) -> list[int]:
        self._enter("amdsmi_get_processor_handles")
        return list(range(self.count))

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        self._enter("amdsmi_get_gpu_device_bdf", handle)
        return f"0000:{0xC1 + handle:02x}:00.0"

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        self._enter("amdsmi_get_gpu_device_uuid", handle)
        return f"fcff74a1-0000-1000-80e9-b388cfe8465{handle}"

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_gpu_asic_info", handle)
        return {"market_name": "AMD Instinct MI300X", "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]"}

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_gpu_driver_info", handle)
        return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "N/A"}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_gpu_activity", handle)
        return self.activity

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_gpu_vram_usage", handle)
        return {"vram_total": 196592, "vram_used": 20480}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_power_info", handle)
        return {"socket_power": 612, "current_socket_power": 612, "average_socket_power": "N/A", "power_limit": 750}

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_energy_count", handle)
        return {"energy_accumulator": 4_000_000, "counter_resolution": 15.25, "timestamp": 1}

    def amdsmi_get_temp_metric(
        self, handle: int, sensor: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
    ) -> int:
        self._enter("amdsmi_get_temp_metric", handle)
        if sensor is AmdSmiTemperatureType.EDGE:  # as on MI300
            raise AmdSmiLibraryException(NOT_SUPPORTED)
        return 61

    def amdsmi_get_clock_info(self, handle: int, kind: AmdSmiClkType) -> dict[str, Any]:
        self._enter("amdsmi_get_clock_info", handle)
        return {"clk": {AmdSmiClkType.GFX: 2100, AmdSmiClkType.MEM: 1300}[kind], "max_clk": 2100}

    def amdsmi_get_gpu_total_ecc_count(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_gpu_total_ecc_count", handle)
        return {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}

    def amdsmi_get_pcie_info(self, handle: int) -> dict[str, Any]:
        self._enter("amdsmi_get_pcie_info", handle)
        metric = {"pcie_width": 16, "pcie_speed": 32000, "pcie_replay_count": "N/A"}
        return {"pcie_static": {"max_pcie_width": 16, "pcie_interface_version": 5}, "pcie_metric": metric}

    def amdsmi_get_gpu_process_list(self, handle: int) -> list[dict[str, Any]]:
        self._enter("amdsmi_get_gpu_process_list", handle)
        usage = {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": 2 << 30}
        return [
            {"name": "python3", "pid": pid, "mem": 2 << 30, "memory_usage": usage} for pid in self.pids.get(handle, [])
        ]
