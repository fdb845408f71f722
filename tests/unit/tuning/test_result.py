"""The table, the sentence under it, and JSON."""

from __future__ import annotations

import json

from gpuwatch.formatting import as_json
from gpuwatch.tools.tuning.result import line
from tests.unit.tuning.machines import MIB, Machine

EXPECTED = """\
workers prefetch   first     batch every  batch/s cores   memory    step
      0        -  600 ms    100 ms ±2.0%       10   0.0  300 MiB  140 ms
      1        2  600 ms    100 ms ±2.0%       10   0.0  350 MiB  100 ms
      2        2  600 ms     50 ms ±2.0%       20   0.0  400 MiB   50 ms
      4        2  600 ms     25 ms ±2.0%       40   0.1  500 MiB   40 ms
      3        2  600 ms   33.3 ms ±2.0%       30   0.1  450 MiB   40 ms
      3        4  600 ms   33.3 ms ±2.0%       30   0.1  450 MiB   40 ms
      3        2  600 ms   33.3 ms ±2.0%       30   0.1  450 MiB   40 ms <-
                 persistent_workers: later passes start in 100 ms

num_workers=3 feeds a 40 ms step (a batch every 33.3 ms); 2 does not (50 ms)
- persistent_workers: the first batch of a later pass after 100 ms instead of
  600 ms
stopped after 14.0 s: num_workers=4 prefetch_factor=2 feeds the step

DataLoader(…, num_workers=3, prefetch_factor=2, pin_memory=False,
    persistent_workers=True)"""


def test_the_table_as_it_is_printed() -> None:
    result = Machine(0.1, second_first_batch_s=0.1).sweep(0.04)
    assert str(result) == EXPECTED


def test_no_line_is_wider_than_it_may_be() -> None:
    result = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=4 * MIB).sweep(0.04)
    assert max(map(len, str(result).splitlines())) <= 80
    assert "left out: would take up to" in str(result)


def test_json_holds_every_row_and_what_was_chosen() -> None:
    result = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=4 * MIB).sweep(0.04)
    got = json.loads(as_json(result))
    assert got["chosen"] == result.keywords()
    assert [row["result"] for row in got["rows"]].count("left_out") >= 1
    assert got["rows"][0]["batch_s"] == 0.5
    assert got["feeds"] is False and got["step_s"] == 0.04


def test_a_row_is_a_line_of_a_log() -> None:
    result = Machine(0.5, shm_bytes=64 * MIB, batch_bytes=4 * MIB).sweep(0.04)
    lines = [line(row) for row in result.rows]
    assert lines[0] == "num_workers=0: a batch every 500 ms"
    assert any("left out: would take up to" in text for text in lines)
