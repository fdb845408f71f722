"""The contract between hook and agent: messages as msgspec structs, their bounds, their encoding. No I/O, no clock.

Every message names its sender and carries cumulative totals: PUSH/PULL loses what a killed receiver had queued, so the
agent books differences, and any later message covers a lost one. `sockets` carries frames, `endpoint` finds the socket.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from sys import float_info
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from gpuwatch.errors import ProtocolError
from gpuwatch.ledger.states import MAX_DECLARED, OTHER, RUN_STATES, SECTIONS

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 17
MAX_HELLO_BYTES = 1 << 16
MAX_STEPS_A_MESSAGE = 1024
MAX_TEXT = 256
MAX_NAME = 136  # of a run, a phase: what labels series
MAX_TAGS = 32
MAX_DEATHS = 256
MAX_WORKERS = 1024
MAX_GROUPS = 16
MAX_REWINDS = 64
MAX_CONCLUSION_BYTES = 1 << 15

HOST_COLUMNS = ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns", "samples", "epoch_start")
DEVICE_COLUMNS = ("input_wait_ns", "host_wait_ns", "device_transfer_ns", "device_compute_ns")
STEP_COLUMNS = (*HOST_COLUMNS, *DEVICE_COLUMNS, "comm_wait_ns")
"""Columns of a step record, one little-endian int64 per step; an absent column, or a row of -1, was not measured.

start_ns is on the sender's monotonic clock. `epoch_start` is 1 for an iterator's first batch, absent if no row is one.
The device's columns are from its own timeline (`input_wait_ns`: the exposed part of the wait, the rest was hidden); for
a step skipped to save cost they are estimated from its neighbours. `comm_wait_ns` is the part of `device_compute_ns` in
which the device waited for other ranks; without device columns, of `compute_ns` in which the training thread did."""

MISSING = -1
CLOCK_SLACK_NS = 1_000_000_000  # by so much two readings of one clock may disagree

_COLUMNS, _STATES = frozenset(STEP_COLUMNS), frozenset(RUN_STATES)
_PARTS = frozenset(("data_wait", "transfer", "compute", *SECTIONS))
_MOST_COUNTED = 1 << 52

Count = Annotated[int, Meta(ge=0, le=_MOST_COUNTED)]  # exact as a float, and a sum of them fits into 64 bits
CountOrMissing = Annotated[int, Meta(ge=MISSING, le=_MOST_COUNTED)]  # -1: not known
Duration = Annotated[int, Meta(ge=0, le=1 << 58)]  # in ns, nine years at most: a run's sum fits into 64 bits
Moment = Annotated[int, Meta(ge=0, le=1 << 62)]  # in ns of some clock
Pid = Annotated[int, Meta(ge=0, le=1 << 31)]
Rank = Annotated[int, Meta(ge=0, le=1 << 31)]

Inode = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]  # finite: neither NaN nor infinite
Ratio = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
StepNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
RunId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Tags = Annotated[dict[Text, Text], Meta(max_length=MAX_TAGS)]
Column = Annotated[bytes, Meta(max_length=8 * MAX_STEPS_A_MESSAGE)]


class Counters(msgspec.Struct):
    """What a sender has counted since it started; cumulative. Times in ns."""

    steps: Count = 0
    samples: CountOrMissing = -1
    tokens: CountOrMissing = -1
    phases_ns: Annotated[dict[Text, Duration], Meta(max_length=MAX_TAGS)] = {}
    """Host timeline: data_wait, transfer, compute of training steps."""
    declared_ns: Annotated[dict[Name, Duration], Meta(max_length=MAX_DECLARED + 1)] = {}
    """Time in declared phases that are no states of their own, by name: see `ledger.states.add_declared`."""
    overhead_ns: Duration = 0  # CPU time of the hook's background thread, and its metered time in the training thread
    hidden_ns: Duration = 0  # data wait that was hidden behind the device's work, in the `device_steps`
    device_steps: Count = 0  # training steps that the device's timeline measured
    drained_steps: Count = 0  # those `device_steps` at whose end the device had no work left
    kept_up_steps: Count = 0  # those `device_steps` in which the device ran each kernel as it was launched
    read_back_steps: Count = 0  # those `device_steps` in which the host waited to read a result back from the device
    unverified_steps: Count = 0  # training steps with work on another device or stream: input wait not certain
    comm_steps: Count = 0  # training steps whose wait for other ranks was measured
    fetches_sampled: Count = 0  # fetches whose CPU time was sampled
    worker_fetches: Count = 0  # batches requested from a loader with workers
    ready_batches: Count = 0  # batches that were ready at these requests, summed
    empty_fetches: Count = 0  # those of `worker_fetches` at which no batch was ready
    eval_wait_ns: Duration = 0  # waits for data in evaluations, as far as their loader is watched
    saves: Count = 0  # checkpoints that were written; files without a step between them are one
    breakdown_ns: Annotated[dict[Text, Duration], Meta(max_length=MAX_TAGS)] = {}  # compute by section, where measured


class Totals(Counters, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec's structs may
    """What the sender has booked since it started, and its counters; cumulative. Times in ns of its monotonic clock."""

    start_ns: Moment
    watermark_ns: Moment
    states_ns: dict[str, Duration]
    records_dropped: Count  # step records that the hook dropped because no agent took them


class Origin(msgspec.Struct, frozen=True):
    """The sender, and its clocks when it sent."""

    version: Annotated[int, Meta(ge=PROTOCOL_VERSION, le=PROTOCOL_VERSION)]
    sender: Text
    boot_id: Text
    monotonic_ns: Moment
    time_ns: Moment


class Loader(msgspec.Struct, frozen=True):
    """The loader that feeds the training steps. None: not known."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None  # Whether batches are pinned: detected from a batch's copy, else the setting.
    persistent_workers: bool | None = None
    batch_bytes: int | None = None
    shared_bytes: int | None = None  # Of that, tensors: workers pass these through /dev/shm, and arrays through a pipe.
    batches: int | None = None  # Batches per epoch, `len(loader)`; None of a sampler that is not torch's.
    worker_pids: Annotated[tuple[Pid, ...], Meta(max_length=MAX_WORKERS)] = ()
    dataset: Text | None = None  # Class of its dataset, or of the loader itself.
    wait_ratio: Ratio | None = None
    """If several loaders feed a step: the share of the wait due to this one, the longest. None: there is only one."""

    @property
    def queued_bytes(self) -> int | None:
        """What a batch takes of /dev/shm in a worker's queue; None: not known."""
        return self.batch_bytes if self.shared_bytes is None else self.shared_bytes


class WorkerDeath(msgspec.Struct, frozen=True):
    """A loader worker that was killed by a signal. None: not known."""

    pid: Pid
    signal: Count
    out_of_memory: bool | None = None  # of SIGKILL: whether the kernel's OOM killer ran since
    oom_kills: Count | None = None  # its kills since, in the run's control group if that counts them, else on the node
    memory_limit_bytes: Count | None = None  # of the control group in which it killed; None also without a limit
    shm_size_bytes: Count | None = None  # of SIGBUS: size of the run's own /dev/shm
    shm_free_bytes: Count | None = None  # what was free in it right after


class Collective(msgspec.Struct, frozen=True):
    """The last collective that a rank has issued in one process group. Source: torch's flight recorder."""

    group: Text  # its description, and its name, which is its own
    number: Count  # How many it has issued in the group, this one included: the same for all ranks that run in step.
    operation: Text  # "all_reduce" …
    pending: bool  # it has not ended
    of_all_ranks: bool = False  # the group is torch's default one


class Standstill(msgspec.Struct, frozen=True):
    """Where a rank is that has made no progress for a while."""

    place: Text = ""  # "save (train.py:41)", the user's function that its training thread is in; empty: none
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=MAX_GROUPS)] = ()


class Flops(msgspec.Struct, frozen=True):
    """Floating-point operations of one rank as the user declares them. None: not declared."""

    per_step: Number | None = None
    per_sample: Number | None = None
    per_token: Number | None = None
    peak: Number | None = None  # operations per second of the rank's device, at the precision that is trained in


class _Sent(msgspec.Struct, frozen=True):
    origin: Origin
    run: RunId
    rank: Rank


class Hello(_Sent, frozen=True, tag="hello"):
    """What the run is. Repeated every second, for an agent that started late or again."""

    name: Text
    job: Text
    world_size: Rank
    pid: Pid
    process_start_ticks: Moment
    pid_namespace: Inode
    host: Text
    timeline: Text  # "host" or "device": the clock of the states
    device: Text
    """"cpu", "cuda" …, "jax:cuda" …, "tensorflow": what it trains on, if known; as `diagnosis.window.Window.device`."""
    loader: Loader | None
    versions: Tags
    tags: Tags
    flops: Flops | None = None
    worker_deaths: Annotated[tuple[WorkerDeath, ...], Meta(max_length=MAX_DEATHS)] = ()
    first_step: StepNumber | None = None
    """Global number of the process's step 0, which a resumed job counts on from; None: not known."""
    rewinds: Annotated[tuple[tuple[Count, StepNumber], ...], Meta(max_length=MAX_REWINDS)] = ()
    """For each checkpoint it later resumed from: the steps it had made by then, and the next one's global number."""


class Steps(_Sent, frozen=True, tag="steps"):
    """Step records since the last message; without any it is a heartbeat."""

    totals: Totals
    activity: Text
    """What the training thread does now: "startup", "data_wait", "step", "between_steps", "idle" (its loop has ended),
    or the declared phase."""
    first_step: Count  # index of the first record, counted from 0 over the sender's life
    columns: dict[str, Column]
    fetch_cpu_ratio: Number | None = None
    """Share of fetches since the last message with the training thread on or waiting for a CPU; None: not sampled."""
    standstill: Standstill | None = None  # None: it makes progress


class Bye(_Sent, frozen=True, tag="bye"):
    """The run ends here; its totals are complete."""

    totals: Totals
    failed: bool = False  # an exception ended the training
    conclusion: Annotated[bytes, Meta(max_length=MAX_CONCLUSION_BYTES)] = b""
    """`diagnosis.finding.Conclusion`, encoded by itself: an agent of another version may leave it out. Empty: none."""


Message: TypeAlias = Hello | Steps | Bye


def pack(values: Sequence[int]) -> bytes:
    """Return `values` as little-endian int64."""
    return array("q", values).tobytes()


def unpack(column: bytes) -> array[int]:
    """Return the int64 values of a packed column."""
    return array("q", column)


def step_count(columns: Mapping[str, bytes]) -> int:
    """Return how many steps the packed columns hold."""
    return max(map(len, columns.values()), default=0) // 8


class _Versioned(msgspec.Struct):
    version: int


class _AnyMessage(msgspec.Struct):
    """What messages of every protocol version have in common."""

    origin: _Versioned


UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises: ValueError for text that is not UTF-8, RecursionError for endless nesting."""

encode = msgspec.msgpack.Encoder().encode


@cache
def _decoder() -> msgspec.msgpack.Decoder[Message]:
    """Return what decodes every message; made by whoever receives, as that takes 2 ms."""
    return msgspec.msgpack.Decoder(Message)


def decode(frame: bytes) -> Message:
    """Return the message in `frame`, checked against every bound: no sender is trusted. Raises: ProtocolError."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are accepted", "too_large")
    try:
        message = _decoder().decode(frame)
    except UNDECODABLE as error:
        _check_version(frame)
        raise ProtocolError(f"message that does not decode: {error}", "malformed") from error
    if isinstance(message, Hello) and len(frame) > MAX_HELLO_BYTES:
        raise ProtocolError(f"hello of {len(frame)} bytes; at most {MAX_HELLO_BYTES} are accepted", "too_large")
    if isinstance(message, Steps) and message.columns:
        _check_columns(message.columns, message.origin.monotonic_ns + CLOCK_SLACK_NS)
    if not isinstance(message, Hello):
        _check_totals(message.totals, message.origin.monotonic_ns + CLOCK_SLACK_NS)
    return message


def _check_version(frame: bytes) -> None:
    """Raise ProtocolError for a message of another protocol version, whose fields may differ."""
    try:
        version = msgspec.msgpack.decode(frame, type=_AnyMessage).origin.version
    except UNDECODABLE:
        return
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"message of protocol version {version}; this agent speaks {PROTOCOL_VERSION}: install the same gpuwatch-training version in the training environment and for the agent",
            "version",
        )


def _check_columns(columns: Mapping[str, bytes], now_ns: int) -> None:
    if not columns.keys() <= _COLUMNS or "start_ns" not in columns:
        raise ProtocolError(f"columns {sorted(columns)}: start_ns is missing, or a column is unknown", "malformed")
    lengths = set(map(len, columns.values()))
    if len(lengths) > 1 or any(length % 8 for length in lengths):
        raise ProtocolError(f"step columns of unequal or odd lengths {sorted(lengths)}", "malformed")
    for name, column in columns.items():
        values = unpack(column) or [0]
        least, most = (0, max(values)) if name == "start_ns" else (MISSING, sum(values))
        if min(values) < least or most > now_ns:
            raise ProtocolError(f"step column {name} has impossible values", "impossible")


def _check_totals(totals: Totals, now_ns: int) -> None:
    states = totals.states_ns
    if not totals.start_ns <= totals.watermark_ns <= now_ns:
        raise ProtocolError("totals that end in the future, or before their start", "impossible")
    if unknown := (states.keys() - _STATES) | ({*totals.phases_ns, *totals.breakdown_ns} - _PARTS):
        raise ProtocolError(f"totals with unknown states or phases {sorted(unknown)}", "malformed")
    if sum(states.values()) != totals.watermark_ns - totals.start_ns:
        raise ProtocolError("totals whose sum is not the time they cover", "unbalanced")
    if sum(totals.declared_ns.values()) > states.get(OTHER, 0):
        raise ProtocolError("declared phases that took longer than the state they are a part of", "unbalanced")
