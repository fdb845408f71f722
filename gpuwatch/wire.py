"""Messages between the hook and the agent: msgspec structs in msgpack. No I/O, no clock.

Every message carries who sent it and the sender's cumulative totals, because PUSH/PULL loses what a killed receiver had
queued: the agent books differences of totals, so that any later message explains the time that a lost one described.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import isfinite
from sys import byteorder
from typing import TypeAlias

import msgspec

from gpuwatch.errors import ProtocolError
from gpuwatch.ledger import RUN_STATES

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_TEXT = 256
MAX_TAGS = 32
MAX_STEPS_A_MESSAGE = 8192

HOST_COLUMNS = ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns", "samples", "epoch_start")
DEVICE_COLUMNS = ("input_wait_ns", "host_wait_ns", "device_transfer_ns", "device_compute_ns")
STEP_COLUMNS = (*HOST_COLUMNS, *DEVICE_COLUMNS, "comm_wait_ns")
"""Columns of a step record, one int64 a step. start_ns is on the sender's monotonic clock; `samples` is -1 where not
known; `epoch_start` is 1 for the first batch of an iterator, and left out where no row is one. The device's columns are what its own timeline says of the
step: `input_wait_ns` is the exposed part of the wait, the rest of it was hidden. `comm_wait_ns` is the part of `compute_ns` in which
the training thread waited for other ranks' gradients, measured where the device's columns are not. A column that is missing, or a row of -1,
was not measured."""

STEP_BUCKETS_S = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
"""Upper bounds of the step time histogram, in seconds; +Inf is the eighth bucket."""

MISSING = -1
_LARGEST = 1 << 62


class Totals(msgspec.Struct, frozen=True):
    """What the sender has booked since it started, all cumulative. Times in ns of the sender's monotonic clock."""

    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    phases_ns: dict[str, int]
    """Host timeline: data_wait, transfer, compute of training steps."""
    steps: int
    samples: int
    """-1 while no batch told its size."""
    step_histogram: list[int]
    """Steps per bucket of STEP_BUCKETS_S (not cumulative over buckets), +Inf last."""
    records_dropped: int
    """Step records that the hook itself let go because no agent took them."""
    overhead_ns: int
    """What the hook cost the training process so far: CPU time of its background thread."""
    hidden_ns: int = 0
    """Data wait that was hidden behind the device's work, in the `device_steps`."""
    device_steps: int = 0
    """Training steps that the device's timeline measured."""
    tokens: int = -1
    """-1 while nobody counted any."""
    comm_steps: int = 0
    """Training steps whose wait for other ranks was measured."""
    drained_steps: int = 0
    """Of the `device_steps` those at whose end the device had nothing left to do."""
    read_back_steps: int = 0
    """Of the `device_steps` those in which a result was read back from the device, for which the host waits."""


class Origin(msgspec.Struct, frozen=True):
    """Who sends, and when by its clocks."""

    version: int
    sender: str
    seq: int
    boot_id: str
    monotonic_ns: int
    time_ns: int


class Loader(msgspec.Struct, frozen=True):
    """Settings of the loader that feeds the training steps. None: not known."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batch_bytes: int | None = None
    batches: int | None = None
    """Batches an epoch, `len(loader)`."""
    worker_pids: tuple[int, ...] = ()


class Flops(msgspec.Struct, frozen=True):
    """Floating-point operations as the user declares them, of one rank. None: not declared."""

    per_step: float | None = None
    per_sample: float | None = None
    per_token: float | None = None
    peak: float | None = None
    """What the rank's device can do in a second, at the precision that is trained in."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who the run is. Repeated every second, so that a late or restarted agent learns it."""

    origin: Origin
    run: str
    name: str
    job: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    process_start_ticks: int
    pid_namespace: int
    host: str
    timeline: str
    """"host" or "device": which clock the states come from."""
    device: str
    """"cpu", "cuda" …: the device that the training works on, as far as known."""
    loader: Loader | None
    versions: dict[str, str]
    tags: dict[str, str]
    device_uuids: tuple[str, ...] = ()
    flops: Flops | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Step records since the last message, possibly none: then it is a heartbeat."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    activity: str
    """What the training thread does now: "startup", "data_wait", "step", "between_steps", or the declared phase."""
    first_step: int
    """Index of the first record, counted from 0 over the sender's life."""
    columns: dict[str, bytes]
    fetch_cpu_ratio: float | None = None
    """Share of the fetches since the last message in which the training thread was on a CPU or in the queue for one;
    None: not sampled."""


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A declared phase began (`seconds` None) or ended."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    name: str
    start_ns: int
    seconds: float | None
    time_to_live_s: float


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The run ends here; its totals are complete."""

    origin: Origin
    run: str
    rank: int
    totals: Totals
    reason: str


Message: TypeAlias = Hello | Steps | Phase | Bye


class _Versioned(msgspec.Struct):
    version: int


class _AnyMessage(msgspec.Struct):
    """All that is asked of a message of another version. At module level: msgspec looks its annotations up there."""

    origin: _Versioned


_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises: a text that is not UTF-8 is a ValueError to it, nesting without end a RecursionError."""

_version_decoder = msgspec.msgpack.Decoder(_AnyMessage)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Return the message in `frame`, checked against every bound of the contract.

    Raises: ProtocolError, whose `reason` is a short word fit for a label.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are taken", "too_large")
    try:
        message = _decoder.decode(frame)
    except _UNDECODABLE as error:
        raise ProtocolError(f"message that does not decode: {error}", _undecodable(frame)) from error
    if message.origin.version != PROTOCOL_VERSION:
        raise _wrong_version(message.origin.version)
    _check_texts(message)
    _check_numbers(message)
    if isinstance(message, Steps):
        _check_columns(message)
    if not isinstance(message, Hello):
        _check_totals(message.totals)
    return message


def _undecodable(frame: bytes) -> str:
    """Tell a message of another protocol version, whose fields may differ, from rubbish."""
    try:
        found = _version_decoder.decode(frame)
    except _UNDECODABLE:
        return "malformed"
    return "malformed" if found.origin.version == PROTOCOL_VERSION else "version"


def _wrong_version(version: int) -> ProtocolError:
    return ProtocolError(
        f"message of protocol version {version}; this agent speaks {PROTOCOL_VERSION}: "
        "install the same gpuwatch-training version in the training environment and for the agent",
        "version",
    )


def _check_texts(message: Message) -> None:
    texts = [message.run, message.origin.sender, message.origin.boot_id]
    if isinstance(message, Hello):
        if len(message.tags) > MAX_TAGS or len(message.versions) > MAX_TAGS:
            raise ProtocolError(f"more than {MAX_TAGS} tags", "too_many_tags")
        texts += [message.name, message.job, message.host, message.device, message.timeline]
        texts += [text for pair in (*message.tags.items(), *message.versions.items()) for text in pair]
    elif isinstance(message, Phase):
        texts.append(message.name)
    elif isinstance(message, Steps):
        texts.append(message.activity)
    if any(len(text) > MAX_TEXT for text in texts):
        raise ProtocolError(f"a text of more than {MAX_TEXT} characters", "text_too_long")
    if not message.run:
        raise ProtocolError("an empty run id", "malformed")


def _check_numbers(message: Message) -> None:
    """Refuse what no process can have: numbers that a database's 64 bits cannot hold, shares that are no numbers."""
    origin = message.origin
    numbers = [origin.seq, origin.monotonic_ns, origin.time_ns, message.rank]
    ratios: list[float | None] = []
    if isinstance(message, Hello):
        numbers += [
            message.local_rank,
            message.world_size,
            message.pid,
            message.process_start_ticks,
            message.pid_namespace,
        ]
        if message.flops is not None:
            ratios += [getattr(message.flops, name) for name in message.flops.__struct_fields__]
    else:
        totals = message.totals
        numbers += [totals.start_ns, totals.watermark_ns, totals.steps, totals.records_dropped, totals.overhead_ns]
        numbers += [totals.hidden_ns, totals.device_steps, totals.tokens + 1, totals.comm_steps]
        numbers += [totals.drained_steps, totals.read_back_steps]
        numbers += [totals.samples + 1, *totals.states_ns.values(), *totals.phases_ns.values(), *totals.step_histogram]
    if isinstance(message, Steps):
        numbers.append(message.first_step)
        ratios.append(message.fetch_cpu_ratio)
    elif isinstance(message, Phase):
        numbers.append(message.start_ns)
        ratios += [message.seconds, message.time_to_live_s]
    if any(not 0 <= number <= _LARGEST for number in numbers):
        raise ProtocolError("a number that is negative, or larger than anything that can be counted", "malformed")
    if any(ratio is not None and not isfinite(ratio) for ratio in ratios):
        raise ProtocolError("a number that is none", "malformed")


def _check_columns(message: Steps) -> None:
    lengths = {len(column) for column in message.columns.values()}
    if not message.columns.keys() <= set(STEP_COLUMNS):
        raise ProtocolError(f"unknown columns {sorted(message.columns.keys() - set(STEP_COLUMNS))}", "malformed")
    if len(lengths) > 1 or any(length % 8 for length in lengths):
        raise ProtocolError(f"step columns of unequal or odd lengths {sorted(lengths)}", "malformed")
    if any(length > 8 * MAX_STEPS_A_MESSAGE for length in lengths):
        raise ProtocolError(f"more than {MAX_STEPS_A_MESSAGE} steps in a message", "too_large")


def _check_totals(totals: Totals) -> None:
    states = totals.states_ns
    if not states.keys() <= set(RUN_STATES) or any(value < 0 for value in states.values()):
        raise ProtocolError("totals with an unknown state or negative time", "malformed")
    if sum(states.values()) != totals.watermark_ns - totals.start_ns:
        raise ProtocolError("totals whose sum is not the time they cover", "unbalanced")
    if len(totals.step_histogram) != len(STEP_BUCKETS_S) + 1:
        raise ProtocolError("a step histogram of another shape", "malformed")


def pack(values: Sequence[int]) -> bytes:
    """Return `values` as little-endian int64."""
    column = array("q", values)
    if byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack(column: bytes) -> array[int]:
    """Return the int64 values of a packed column."""
    values: array[int] = array("q")
    values.frombytes(column)
    if byteorder == "big":
        values.byteswap()
    return values


def step_count(columns: Mapping[str, bytes]) -> int:
    """Return how many steps the packed columns hold."""
    return max((len(column) for column in columns.values()), default=0) // 8
