"""The NVIDIA driver: does it answer, and should there be one."""

from __future__ import annotations

from collections import Counter

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI class of graphics and compute: an NVIDIA sound function or an NVSwitch is no GPU."""
_TOOLKIT = "start the container with the GPU runtime: docker run --gpus all … (needs the NVIDIA Container Toolkit)"


def driver(around: Surroundings) -> Outcome:
    """NVML's answer, against what the hardware promises: a machine without NVIDIA devices needs no driver."""
    nvml = around.nvml()
    if nvml.state == "answers":
        return _answering(around)
    if nvml.state == "mismatch":
        return problem(
            f"the driver's library and its kernel module are of different versions: {nvml.error}",
            "the driver was updated under way: reboot, or unload nvidia_uvm, nvidia_drm, nvidia_modeset, nvidia and "
            "modprobe nvidia; restart containers",
        )
    if nvml.state == "hangs":
        return problem(f"NVML hangs: {nvml.error}", "dmesg | grep -iE 'nvrm|xid' says why; often only a reboot helps")
    if nvml.state == "fails":
        return problem(f"NVML does not start: {nvml.error}", "run nvidia-smi, and dmesg | grep -iE 'nvrm|xid'")
    devices = nvidia_devices(around)
    if not devices:
        return skipped("no GPU expected: there is no NVIDIA device here, and no driver")
    found = f"{', '.join(devices)}, and "
    if nvml.state == "no module":
        return problem(found + "nvidia-ml-py is not installed to ask the driver with", "pip install nvidia-ml-py")
    if nvml.state == "no library" and (around.procfs / "driver/nvidia/version").exists():
        return problem(found + "a loaded driver, but no libnvidia-ml.so.1 here", _TOOLKIT)
    missing = "no libnvidia-ml.so.1" if nvml.state == "no library" else "the driver is not loaded"
    return problem(found + missing, f"install or load it (modprobe nvidia; dmesg says why it fails); or {_TOOLKIT}")


def _answering(around: Surroundings) -> Outcome:
    nvml = around.nvml()
    cuda = f", CUDA {nvml.cuda[0]}.{nvml.cuda[1]}" if nvml.cuda else ""
    names = ", ".join(f"{count} × {name}" for name, count in Counter(name for _, name in nvml.gpus).items())
    if nvml.silent:
        return problem(
            f"driver {nvml.driver}{cuda}; lost: {'; '.join(nvml.silent)}",
            "dmesg | grep -i xid says why; nvidia-smi --gpu-reset -i N once nothing uses it, else a reboot",
        )
    if nvml.gpus:
        return ok(f"{nvml.driver}{cuda}: {names}")
    if around.environ.get("NVIDIA_VISIBLE_DEVICES", "") in ("void", "none"):
        return warning(f"driver {nvml.driver}, and no GPU was given to this container", _TOOLKIT)
    return warning(f"driver {nvml.driver}, and it lists no GPU", "lspci -d 10de: lists the hardware; then dmesg")


def nvidia_devices(around: Surroundings) -> list[str]:
    """Return what says that there is an NVIDIA GPU. Source: /dev/nvidiaN; /sys/bus/pci/devices, vendor and class."""
    found = [f"/dev/{path.name}" for path in sorted(around.dev.glob("nvidia[0-9]*"))]
    for device in sorted((around.sysfs / "bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            found.append(f"PCI {device.name}")
    return found
