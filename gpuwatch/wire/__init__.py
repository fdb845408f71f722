"""The contract between the hook and the agent: messages, their columns, their bounds. No I/O, no clock: `sockets` and `endpoint` carry them."""

from gpuwatch.wire.checks import MAX_STEPS_A_MESSAGE, MAX_TAGS, MAX_TEXT
from gpuwatch.wire.codec import MAX_MESSAGE_BYTES, decode, encode
from gpuwatch.wire.columns import DEVICE_COLUMNS, HOST_COLUMNS, MISSING, STEP_COLUMNS, pack, step_count, unpack
from gpuwatch.wire.messages import (
    PROTOCOL_VERSION,
    STEP_BUCKETS_S,
    Bye,
    Flops,
    Hello,
    Loader,
    LoaderSettings,
    Message,
    Origin,
    Phase,
    Steps,
    Totals,
    WorkerDeath,
)

__all__ = [
    "DEVICE_COLUMNS",
    "HOST_COLUMNS",
    "MAX_MESSAGE_BYTES",
    "MAX_STEPS_A_MESSAGE",
    "MAX_TAGS",
    "MAX_TEXT",
    "MISSING",
    "PROTOCOL_VERSION",
    "STEP_BUCKETS_S",
    "STEP_COLUMNS",
    "Bye",
    "Flops",
    "Hello",
    "Loader",
    "LoaderSettings",
    "Message",
    "Origin",
    "Phase",
    "Steps",
    "Totals",
    "WorkerDeath",
    "decode",
    "encode",
    "pack",
    "step_count",
    "unpack",
]
