"""Queries of the node's history: each opens a connection of its own, so that any thread may ask while it is written."""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from gpuwatch import wire
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.gpu_ledger import GpuRecord
from gpuwatch_agent.run_records import RunRecord

logger = logging.getLogger(__name__)


_STEP_COLUMNS = (
    "time_s",
    "data_wait_s",
    "transfer_s",
    "compute_s",
    "input_wait_s",
    "host_wait_s",
    "device_transfer_s",
    "device_compute_s",
    "samples",
    "epoch_start",
)
"""What `History.steps` gives of each step."""


class HistoryReader:
    """Reads one history file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self) -> list[RunRecord]:
        """Return the runs that are kept, an unreadable record left out."""
        return list(self._records("SELECT record FROM run", RunRecord))

    def gpus(self) -> list[GpuRecord]:
        return list(self._records("SELECT record FROM gpu", GpuRecord))

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return (labels, [(Unix time, value)]) of each matching series, at most `points` a series: each interval's last."""
        start_ms, end_ms = int(start_s * 1000), int(end_s * 1000)
        # Intervals are the same at every request (panels do not flicker), so that one more may be touched.
        step_ms = max(1, -((start_ms - end_ms) // (points - 1))) if points > 1 else end_ms + 1
        names = BY_NAME[metric].labels
        found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        columns: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT max(time_ms), layout, row FROM tick WHERE time_ms BETWEEN ? AND ? GROUP BY time_ms / ?",
                (start_ms, end_ms, step_ms),
            )
            for time_ms, layout, row in rows:
                if layout not in columns:
                    columns[layout] = _columns_of(reader, layout, metric, names, labels)
                for index, values in columns[layout]:
                    found.setdefault(values, []).append((time_ms / 1000, struct.unpack_from("=d", row, 8 * index)[0]))
        return [(dict(zip(names, values, strict=True)), series) for values, series in found.items()]

    def steps(self, run: str, rank: int, last: int) -> tuple[int, dict[str, list[float | None]]]:
        """Return (index of the first, columns) of the last steps: times in s, `time_s` the step's begin, oldest first.

        None: not measured.
        """
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT first_step, count, offset_ns, columns FROM steps WHERE run = ? AND rank = ? ORDER BY id DESC",
                (run, rank),
            )
            taken, kept = 0, []
            for row in rows:
                kept.append(row)
                taken += row[1]
                if taken >= last:
                    break
        kept.reverse()
        first = kept[0][0] if kept else 0
        out: dict[str, list[float | None]] = {name: [] for name in _STEP_COLUMNS}
        for _, _, offset_ns, blob in kept:
            columns = {n: wire.unpack(c) for n, c in msgspec.msgpack.decode(blob, type=dict[str, bytes]).items()}
            missing = [wire.MISSING] * len(columns["start_ns"])
            out["time_s"] += [(start + offset_ns) / 1e9 for start in columns["start_ns"]]
            for name in ("data_wait", "transfer", "compute"):
                out[f"{name}_s"] += [ns / 1e9 if ns >= 0 else None for ns in columns.get(f"{name}_ns", missing)]
            for name in ("input_wait", "host_wait", "device_transfer", "device_compute"):
                out[f"{name}_s"] += [ns / 1e9 if ns >= 0 else None for ns in columns.get(f"{name}_ns", missing)]
            out["samples"] += [value if value >= 0 else None for value in columns.get("samples", missing)]
            out["epoch_start"] += columns.get("epoch_start", [0] * len(missing))
        surplus = max(0, taken - last)
        return first + surplus, {name: column[surplus:] for name, column in out.items()}

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=1.0)) as connection:
            yield connection

    def _records(self, query: str, kind: type[msgspec.Struct]) -> Iterable:  # type: ignore[type-arg]
        with self._reader() as reader:
            for (blob,) in reader.execute(query).fetchall():
                try:
                    yield msgspec.msgpack.decode(blob, type=kind)
                except msgspec.MsgspecError as error:
                    logger.warning("history %s: a record is left out: %s", self.path, error)


def _columns_of(
    reader: sqlite3.Connection, layout: int, metric: str, names: tuple[str, ...], labels: Mapping[str, str]
) -> list[tuple[int, tuple[str, ...]]]:
    (text,) = reader.execute("SELECT series FROM layout WHERE id = ?", (layout,)).fetchone()
    matching = []
    for index, (name, values) in enumerate(json.loads(text)):
        if name == metric and labels.items() <= dict(zip(names, values, strict=False)).items():
            matching.append((index, tuple(values)))
    return matching
