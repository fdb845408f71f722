"""Step records on the wire: columns of packed little-endian int64, one value a step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from sys import byteorder

HOST_COLUMNS = ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns", "samples", "epoch_start")
DEVICE_COLUMNS = ("input_wait_ns", "host_wait_ns", "device_transfer_ns", "device_compute_ns")
STEP_COLUMNS = (*HOST_COLUMNS, *DEVICE_COLUMNS, "comm_wait_ns")
"""Columns of a step record, one int64 a step. start_ns is on the sender's monotonic clock; `samples` is -1 where not
known; `epoch_start` is 1 for the first batch of an iterator, and left out where no row is one. The device's columns are what its own timeline says of the
step: `input_wait_ns` is the exposed part of the wait, the rest of it was hidden; of a step that it left out to save cost they are an estimate by the
others. `comm_wait_ns` is the part of `device_compute_ns` in which the device waited for other ranks; where the device's columns are
not measured, the part of `compute_ns` in which the training thread did. A column that is missing, or a row of -1, was not measured."""

MISSING = -1


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
    return max(map(len, columns.values()), default=0) // 8
