"""What NVML's error codes mean for a reading, a GPU, a node."""

from __future__ import annotations

import pynvml

ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_NOT_READY,
}
"""This GPU does not tell this value: leave it out."""

LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
}
"""Nothing can be had of this GPU until the devices are enumerated anew."""

DOUBTFUL = {
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,  # the handle may be of an earlier enumeration
}
"""This value is left out, and a new enumeration may mend it."""

NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here,"
    " or this container was started without its GPU runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
}
"""What makes a node one without GPUs, in words."""


def why(error: pynvml.NVMLError) -> str:
    """Return an NVML error in words, with the remedy for the one that only people can mend."""
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return f"{error} The driver was replaced while it was loaded: reboot, or reload it and restart the agent"
    return str(error)
