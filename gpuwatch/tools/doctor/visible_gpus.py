"""Which GPUs a training sees: CUDA_VISIBLE_DEVICES against NVML's list, without asking CUDA."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped
from gpuwatch.tools.doctor.surroundings import Surroundings


def visible_gpus(around: Surroundings) -> Outcome:
    """The GPUs that are left by CUDA_VISIBLE_DEVICES. CUDA ignores a wrong entry and all behind it, silently."""
    nvml = around.nvml()
    if nvml.state != "answers":
        return skipped("there is no driver that lists GPUs")
    value = around.environ.get("CUDA_VISIBLE_DEVICES")
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

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables": entries behind an invalid one are not looked at; -1 ends
    the list; a GPU that is named twice makes the whole list invalid. MIG instances are taken for what they say.
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
            return len(used), f"'{entry}' {why}, so it and all behind it are ignored"
        if named[0] in used:
            return 0, f"'{entry}' is there twice, so that CUDA sees none"
        used.add(named[0])
    return len(used), ""
