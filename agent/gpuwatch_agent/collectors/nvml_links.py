"""What NVML says of a GPU's links and memory errors: PCIe, NVLink, ECC. It changes seldom, and is asked for seldom.

Every function takes a device handle of `pynvml` and raises its `NVMLError`. *Never run on real hardware yet.*
Source: https://docs.nvidia.com/deploy/nvml-api, and nvml.h for the units.
"""

from __future__ import annotations

from collections.abc import Callable

import pynvml

from gpuwatch_agent.collectors.nvml import Handle, Reading, Value

INTERVAL_S = 10.0
_ALL_LINKS = 0xFFFFFFFF
"""As a field's scope: the sum over a GPU's NVLinks."""
_LINK_ERRORS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
)
_KIB = 1024


def pcie_link(handle: Handle) -> list[Value]:
    """Return generation and lanes of the link as it is now: both are lower while the GPU saves power."""
    generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    lanes = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    return [("gpuwatch_gpu_pcie_generation", generation, ()), ("gpuwatch_gpu_pcie_lanes", lanes, ())]


def pcie_replays(handle: Handle) -> list[Value]:
    """Return how many packets were sent again: a riser, a slot or a cable that does not hold its speed."""
    return [("gpuwatch_gpu_pcie_replays_total", pynvml.nvmlDeviceGetPcieReplayCounter(handle), ())]


def ecc_errors(handle: Handle) -> list[Value]:
    """Return memory errors since the driver was loaded. Not supported where ECC is off."""
    kinds = {
        "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    return [
        (
            "gpuwatch_gpu_ecc_errors_total",
            pynvml.nvmlDeviceGetTotalEccErrors(handle, code, pynvml.NVML_VOLATILE_ECC),
            (kind,),
        )
        for kind, code in kinds.items()
    ]


def nvlinks(handle: Handle) -> list[Value]:
    """Return how many NVLinks are up, and the errors of those. A GPU without any: not supported."""
    up, errors, told = 0, 0, False
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            if link == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None
            break  # there are no more
        if not active:
            continue
        up += 1
        for counter in _LINK_ERRORS:
            try:
                errors += pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
                told = True
            except pynvml.NVMLError_NotSupported:
                continue
    values: list[Value] = [("gpuwatch_gpu_nvlink_links", up, ())]
    return [*values, ("gpuwatch_gpu_nvlink_errors_total", errors, ())] if told else values


def nvlink_bytes(handle: Handle) -> list[Value]:
    """Return the data over all NVLinks since the driver was loaded. NVML's unit is KiB."""
    fields = {
        "gpuwatch_gpu_nvlink_transmit_bytes_total": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "gpuwatch_gpu_nvlink_receive_bytes_total": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    }
    answers = pynvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in fields.values()])
    return [
        (metric, answer.value.ullVal * _KIB, ())
        for metric, answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == pynvml.NVML_SUCCESS
    ]


def mig_instances(handle: Handle) -> list[Value]:
    """Return a GPU's MIG instances and their memory; nothing where MIG is off."""
    if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    values: list[Value] = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue  # no instance has this index now
        number = str(pynvml.nvmlDeviceGetGpuInstanceId(instance))
        name = pynvml.nvmlDeviceGetName(instance)
        profile = (name.decode(errors="replace") if isinstance(name, bytes) else name).rpartition(" MIG ")[2]
        profile = profile.rpartition("c.")[2]  # "1c.3g.71gb": one of several compute instances of a 3g.71gb
        memory = pynvml.nvmlDeviceGetMemoryInfo(instance)
        values += [
            ("gpuwatch_gpu_mig_info", 1, (number, profile)),
            ("gpuwatch_gpu_mig_memory_used_bytes", memory.used, (number,)),
            ("gpuwatch_gpu_mig_memory_total_bytes", memory.total, (number,)),
        ]
    seen = {value[:1] + value[2:]: value for value in values}  # two compute instances of one GPU instance are one here
    return list(seen.values())


def _seldom(function: Callable[[Handle], list[Value]]) -> Reading:
    return Reading(function.__name__, lambda gpu: function(gpu.handle), INTERVAL_S)


LINK_READINGS = tuple(map(_seldom, (pcie_link, pcie_replays, ecc_errors, nvlinks, nvlink_bytes, mig_instances)))
