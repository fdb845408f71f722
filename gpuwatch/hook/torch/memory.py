"""Peaks of torch's CUDA allocator, and what it knows where memory ran out. No call sets up a device or waits for it."""

import os
import sys
from typing import Any

from gpuwatch.errors import pass_on
from gpuwatch.formatting import size

SNAPSHOT = "GPUWATCH_OOM_SNAPSHOT"  # names the file; then torch notes where each block is allocated


def peak_bytes() -> dict[str, int]:
    """Return peak bytes of tensors (`allocated`) and torch (`reserved`) on the device with most; empty without CUDA."""
    cuda, kinds = getattr(sys.modules.get("torch"), "cuda", None), ("reserved", "allocated")
    if cuda is None or not cuda.is_initialized():
        return {}
    try:
        found = [cuda.memory_stats(device) for device in range(cuda.device_count())]
    except Exception:  # an allocator that counts nothing
        return {}
    peaks = [{kind: of[f"{kind}_bytes.all.peak"] for kind in kinds} for of in found if "reserved_bytes.all.peak" in of]
    return max(peaks, key=lambda of: of["reserved"], default={})


def explain(failure: type[BaseException] | None, batch_bytes: int | None, rank: int) -> str:
    """Return what is known of a lack of GPU memory that ended the run, and write its snapshot; empty for other ends."""
    torch: Any = sys.modules.get("torch")
    is_lack = torch is not None and failure is not None and issubclass(failure, torch.cuda.OutOfMemoryError)
    if not is_lack or not (peak := peak_bytes()):
        return ""
    allocated, reserved = peak["allocated"], peak["reserved"]
    text = f"gpuwatch: out of GPU memory: at the peak {size(allocated)} in tensors, {size(reserved)} reserved by torch"
    if batch_bytes is not None:
        text += f"; a batch takes {size(batch_bytes)}, and the activations computed from it many times as much"
    text += ". Use a smaller batch with gradient accumulation, bf16, or torch.utils.checkpoint"
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
    settings = ",".join(os.environ.get(name, "") for name in names).replace(" ", "")  # as torch reads them
    if reserved - allocated > 0.1 * reserved and "expandable_segments:True" not in settings:
        text += "; much of the reserved memory was not in use: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if not (file := os.environ.get(SNAPSHOT)):
        return f"{text}. {SNAPSHOT}=FILE records the live allocations"
    file += f".rank{rank}" * (rank > 0)
    try:
        torch.cuda.memory._dump_snapshot(file)
    except Exception as error:  # a full disk, say
        pass_on(error)
        return f"{text}. The live allocations could not be written: {error}"
    return f"{text}. The live allocations are in {file}, which https://pytorch.org/memory_viz shows"
