"""docs/concepts/causes.md against the code: every cause is there, its numbers are the table's, its roots those of the diagnosis."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwatch.diagnosis.rules import CAUSES, roots_of
from gpuwatch.diagnosis.thresholds import Thresholds

PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "causes.md").read_text()
TABLE, ROOT_TABLE = (part.split("\n## ")[0] for part in (PAGE, PAGE.split("## Root first")[1]))
ROWS = dict(re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", TABLE, re.M))


def row(cause: str) -> str:
    return next(text for names, text in ROWS.items() if f"`{cause}`" in names)


def test_every_cause_has_its_row_and_no_other_has() -> None:
    named = {name for names in ROWS for name in re.findall(r"`([a-z_]+)`", names)}
    assert named == set(CAUSES)


def test_numbers_of_the_page_are_those_of_the_table() -> None:
    plain = Thresholds()
    numbers = {
        "input_single_process": f"≥ {plain.input_share:.0%}",
        "input_cpu_saturated": f"≥ {plain.cores_exhausted:.0%}",
        "input_disk": f"≥ {plain.worker_waiting:.0%}",
        "input_network": f"≥ {plain.network_bytes_per_s / 1e3:.0f} kB/s",
        "artificial_limit": f"≥ {plain.worker_waiting:.0%}",
        "burst_every_n": f"autocorrelation ≥ {plain.burst_correlation:.1f}), ≥ {plain.burst_share:.0%}",
        "too_many_workers": f"cores ≥ {plain.cores_exhausted:.0%} busy, CPU pressure ≥ {plain.cpu_pressure:.0%}",
        "epoch_start_pause": f"≥ {plain.first_batch_factor:.0f} × the median and take ≥ {plain.first_batch_share:.0%}",
        "transfer_pageable": f"≥ {plain.transfer_share:.0%}",
        "transfer_pcie": f"≥ {plain.pcie_bytes_per_s / 1e9:.0f} GB/s",
        "host_bound": f"≥ {plain.kept_up_share:.0%} of the steps it runs each kernel as it is launched",
        "checkpoint_interval": f"≥ {plain.checkpoint_interruptions:.0f} times and whose saves were measured: "
        f"another interval between them gains ≥ {plain.checkpoint_gain:.0%}",
        "straggler": f"≥ {plain.straggler_share:.0%}",
        "eval_share": f"≥ {plain.phase_share:.0%}",
        "shm_exhaustion": f"≥ {plain.shm_used:.0%}",
        "hung": f"≥ {plain.gpu_busy:.0%} busy at ≤ {plain.power_fallen:.0%}",
        "memory_creep": f"by ≥ {plain.memory_creep_share:.0%} of its size over ≥ {plain.memory_creep_s / 60:.0f} minutes",
        "throttled": f"≥ {plain.throttled_share:.0%}",
        "held_idle": f"≤ {plain.gpu_idle_utilization:.0%} for {plain.gpu_idle_s / 60:.0f} minutes",
        "mfu_mismatch": f"≥ {plain.mfu_gap * 100:.0f} points",
        "gpu_saturated": f"compute ≥ {plain.saturated_share:.0%} and the driver sees the GPU ≥ {plain.gpu_busy:.0%}",
    }
    assert {cause: text for cause, text in numbers.items() if text not in row(cause)} == {}


def test_the_roots_of_the_page_are_those_of_the_diagnosis() -> None:
    named = {name for name in re.findall(r"`([a-z_]+)`", ROOT_TABLE)} - {"root"}
    in_code = {name for cause in CAUSES if (roots := roots_of(cause)) for name in (cause, *roots)}
    if "`input_…`" in ROOT_TABLE:  # one row is about all of them
        named |= {name for name in in_code if name.startswith("input_")}
    assert in_code - named == set(), "a row under Root first in docs/concepts/causes.md"
    assert named - in_code == set()


def test_every_rule_has_a_test_in_this_folder() -> None:
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    assert [cause for cause in CAUSES if not re.search(rf"\b{cause}\b", texts)] == []
