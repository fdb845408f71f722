"""The NVIDIA driver, the GPUs that a training sees, and whether torch's build fits it. Nothing initialises CUDA."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpuwatch.host.proc import text_of
from gpuwatch.tools.doctor.machine import Machine, NvmlFacts, Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.software import numbers

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of graphics and compute: an NVIDIA sound function or an NVSwitch is no GPU
_BROKEN = {
    "mismatch": (
        "the driver's library and its kernel module are of different versions",
        "the driver was updated while loaded: reboot, or unload nvidia_uvm, nvidia_drm, nvidia_modeset, nvidia and "
        "modprobe nvidia; restart containers",
    ),
    "hangs": (
        "NVML hangs",
        "if nvidia-smi only takes long, keep the driver running: nvidia-smi -pm 1; else dmesg | grep -iE 'nvrm|xid' shows "
        "why; often only a reboot helps",
    ),
    "fails": ("NVML does not start", "run nvidia-smi, and dmesg | grep -iE 'nvrm|xid'"),
}
_TOOLKIT = "start the container with the GPU runtime: docker run --gpus all … (needs the NVIDIA Container Toolkit)"
_LOAD = f"install or load it (modprobe nvidia; dmesg shows why it fails); or {_TOOLKIT}"


def driver(machine: Machine) -> Outcome:
    """The answer of NVML, against the installed hardware: a machine without NVIDIA devices needs no driver."""
    nvml = machine.nvml()
    if nvml.state == "answers":
        return _answering(nvml, machine.environ.get("NVIDIA_VISIBLE_DEVICES", ""))
    if nvml.state in _BROKEN:
        found, remedy = _BROKEN[nvml.state]
        return problem(f"{found}: {nvml.error}", remedy)
    if not (devices := nvidia_devices(machine)):
        return skipped("no GPU expected: there is no NVIDIA device here, and no driver")
    missing, remedy = {
        "no module": ("nvidia-ml-py is not installed, so the driver cannot be queried", "pip install nvidia-ml-py"),
        "no library": ("no libnvidia-ml.so.1", _LOAD),
        "not loaded": ("the driver is not loaded", _LOAD),
    }[nvml.state]
    if nvml.state == "no library" and (machine.procfs / "driver/nvidia/version").exists():
        missing, remedy = "a loaded driver, but no libnvidia-ml.so.1 here", _TOOLKIT
    return problem(f"{', '.join(devices)}, and {missing}", remedy)


def _answering(nvml: NvmlFacts, given: str) -> Outcome:
    cuda = f", CUDA {nvml.cuda[0]}.{nvml.cuda[1]}" if nvml.cuda else ""
    if nvml.lost:
        return problem(
            f"driver {nvml.driver}{cuda}; lost: {'; '.join(nvml.lost)}",
            "dmesg | grep -i xid shows why; nvidia-smi --gpu-reset -i N once no process uses it, else a reboot",
        )
    if nvml.gpus:
        counts = Counter(name for _, name in nvml.gpus)
        return ok(f"{nvml.driver}{cuda}: {', '.join(f'{count} × {name}' for name, count in counts.items())}")
    if given in ("void", "none"):
        return warning(f"driver {nvml.driver}, and no GPU was given to this container", _TOOLKIT)
    return warning(f"driver {nvml.driver}, and it lists no GPU", "lspci -d 10de: lists the hardware; then dmesg")


def nvidia_devices(machine: Machine) -> list[str]:
    """Return the evidence of an NVIDIA GPU. Source: /dev/nvidiaN; /sys/bus/pci/devices, vendor and class."""
    found = [f"/dev/{path.name}" for path in sorted(machine.dev.glob("nvidia[0-9]*"))]
    for device in sorted((machine.sysfs / "bus/pci/devices").glob("*")):
        if text_of(device / "vendor") == _NVIDIA and text_of(device / "class").startswith(_DISPLAY):
            found.append(f"PCI {device.name}")
    return found


def visible_gpus(machine: Machine) -> Outcome:
    """The GPUs that CUDA_VISIBLE_DEVICES selects. CUDA silently ignores an invalid entry and all entries after it."""
    nvml = machine.nvml()
    if nvml.state != "answers":
        return skipped("there is no driver that lists GPUs")
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    uuids = [uuid for uuid, _ in nvml.gpus]
    if not uuids:
        return skipped("the driver lists no GPU")
    if value is None:
        return ok(f"all {len(uuids)} (CUDA_VISIBLE_DEVICES is not set)")
    seen, wrong = visible(value, uuids)
    found = f"CUDA_VISIBLE_DEVICES={value}: {seen} of {len(uuids)} GPUs are visible"
    if wrong:
        return problem(f"{found}; {wrong}", "correct it: indices below the number of GPUs, or UUIDs of nvidia-smi -L")
    if not seen:
        return problem(found, "unset CUDA_VISIBLE_DEVICES, unless training is to run on the CPU")
    return ok(found)


def visible(value: str, uuids: Sequence[str]) -> tuple[int, str]:
    """Return how many GPUs CUDA sees, and what is wrong with the value, "" for nothing.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables": entries after an invalid one are ignored; -1 ends
    the list; a GPU that is named twice makes the whole list invalid. MIG instances are not checked.
    """
    used: set[str] = set()
    for entry in (part.strip() for part in value.split(",")):
        if entry in ("", "-1"):
            break
        if entry.isdigit():
            named = [uuids[int(entry)]] if int(entry) < len(uuids) else []
        elif entry.startswith("MIG-"):
            named = [entry]
        else:
            named = [uuid for uuid in uuids if uuid.startswith(entry)]
        if len(named) != 1:
            why = "is no GPU of this machine" if not named else "fits several GPUs"
            return len(used), f"'{entry}' {why}, so it and all that follow are ignored"
        if named[0] in used:
            return 0, f"'{entry}' is listed twice, so CUDA sees no GPU"
        used.add(named[0])
    return len(used), ""


def torch(machine: Machine) -> Outcome:
    """The CUDA version of torch's build against the driver, which runs its own major version of CUDA and earlier ones.

    torch is not imported: that is slow, and may initialise CUDA. Source: docs.nvidia.com/deploy/cuda-compatibility.
    """
    if (folder := machine.folder_of("torch")) is None:
        return skipped("not installed in this Python")
    version, cuda, hip = read_build(folder)
    nvml = machine.nvml()
    if hip:
        return ok(f"{version}, built for ROCm {hip}")
    if cuda is None:
        found = f"{version} is built for CPUs, and there are {len(nvml.gpus)} NVIDIA GPUs"
        return warning(found, _install(nvml.cuda)) if nvml.gpus else ok(f"{version}, built for CPUs")
    if nvml.cuda is None:
        return ok(f"{version}, built for CUDA {cuda}; no driver to compare with")
    runs = ".".join(map(str, nvml.cuda))
    if numbers(cuda)[0] > nvml.cuda[0]:
        return problem(
            f"{version} is built for CUDA {cuda}; driver {nvml.driver} runs CUDA {runs} at most",
            f"update the driver, or {_install(nvml.cuda)}",
        )
    later = " (minor versions run together)" if numbers(cuda)[:2] > nvml.cuda else ""
    return ok(f"{version}, built for CUDA {cuda}; the driver runs CUDA {runs}{later}")


def read_build(folder: Path) -> tuple[str, str | None, str | None]:
    """Return torch's version, and the CUDA and ROCm versions it was built for. Source: torch/version.py."""
    text = (folder / "version.py").read_text()

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found[1] if found else None

    return value("__version__") or "?", value("cuda"), value("hip")


def _install(cuda: tuple[int, int] | None) -> str:
    """Return the command for a driver; pytorch.org lists the CUDA versions that have an index."""
    build = f"cu{cuda[0]}{cuda[1]}" if cuda else "…"
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"
