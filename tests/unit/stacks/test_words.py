"""Stacks in words."""

from __future__ import annotations

from gpuwatch.diagnosis.rules import FALLBACK_RULES, RULES
from gpuwatch.tools.stacks.causes import LOOK_AT
from gpuwatch.tools.stacks.records import HotLine, ProcessStacks, Stacks, evidence, lines

MAIN = HotLine("/home/alice/train.py", 20, "main", 0.98, 0.98)


def decode(ratio: float) -> HotLine:
    return HotLine("/home/alice/dataset.py", 88, "decode", ratio, 0.9)


def process(kind: str, index: int, *hot: HotLine, rank: int = 0) -> ProcessStacks:
    return ProcessStacks(rank, 100 + index, kind, index, 50, hot, 0.0, "selectors.py:415 select")


def stacks(*processes: ProcessStacks) -> Stacks:
    return Stacks(0.0, 2.0, 25, processes, ())


def test_a_line_a_process() -> None:
    found = stacks(process("training", 0, MAIN), process("worker", 0, decode(0.71)), process("worker", 1))
    assert list(lines(found)) == [
        "training  train.py:20 main: 98% of samples",
        "worker 0  dataset.py:88 decode: 71% of samples (90% in all of decode)",
        "worker 1  never in your code; selectors.py:415 select",
    ]


def test_workers_that_stand_at_one_line_are_one_item_of_evidence() -> None:
    found = stacks(process("training", 0, MAIN), *(process("worker", i, decode(0.6 + 0.1 * i)) for i in range(3)))
    (item,) = evidence(found, of_training=False)
    assert item.text == "dataset.py:88 decode: 70% of samples (90% in all of decode) (3 of 3 workers)"
    assert (round(item.value, 6), item.unit) == (0.7, "ratio")


def test_of_a_hang_it_is_where_every_rank_stands() -> None:
    other = HotLine("/home/alice/train.py", 31, "save", 1.0, 1.0)
    found = stacks(*(process("training", 0, MAIN, rank=rank) for rank in (0, 1)), process("training", 0, other, rank=2))
    assert [item.text for item in evidence(found, of_training=True)] == [
        "train.py:20 main: 98% of samples (2 of 3 ranks)",
        "train.py:31 save: 100% of samples (rank 2)",
    ]


def test_without_workers_it_is_the_training_process_that_fetches() -> None:
    assert "train.py:20" in evidence(stacks(process("training", 0, MAIN)), of_training=False)[0].text


def test_every_cause_that_is_looked_at_is_a_rules() -> None:
    assert set(LOOK_AT) <= {rule.__name__ for rule in (*RULES, *FALLBACK_RULES)}
