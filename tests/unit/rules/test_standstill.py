"""A hang names the rank that the others wait for, by what each has issued last in each process group."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules.progress import hung, stalled
from gpuwatch.diagnosis.window import GpuFacts, MeanStep, RankFacts
from gpuwatch.wire import Collective, Standstill
from tests.unit.rules.windows import HEALTHY


def issued(
    number: int, pending: bool = False, group: str = "default_pg 0", operation: str = "all_reduce"
) -> Collective:
    return Collective(group, number, operation, pending, group == "default_pg 0")


def diagnosed(*ranks: Standstill | None) -> Finding:
    facts = tuple(RankFacts(rank, MeanStep(9, 0.01, 0.0, 0.03), None, each) for rank, each in enumerate(ranks))
    finding = stalled(replace(HEALTHY, stalled_s=60.0, activity="step", ranks=facts, standstill=ranks[0]))
    assert finding is not None
    return finding


def late(finding: Finding) -> list[str]:
    return [each.text for each in finding.evidence if each.what == "late"]


WAITS = Standstill("train (train.py:30)", (issued(6, pending=True),))


def test_the_rank_that_is_behind_is_named_with_its_place_and_the_stacks_to_take() -> None:
    finding = diagnosed(WAITS, WAITS, Standstill("save (save.py:41)", (issued(5),)), WAITS)
    assert finding.rank == 2 and finding.title.endswith("the other ranks wait for rank 2")
    text = "rank 2 has not issued all_reduce 6 of group default_pg 0, in which other ranks wait: it is in save (save.py:41)"
    assert late(finding) == [text]
    assert "to see where rank 2 is blocked" in finding.advice
    assert finding.evidence[-1].text == "the training thread is inside a step, in train (train.py:30)"


def test_a_rank_that_is_behind_because_it_waits_in_another_group_is_not_the_reason() -> None:
    """Rank 2 waits for rank 3 in their own group, and so it is missing in the group of all, too."""
    two = Standstill("train (train.py:31)", (issued(5), issued(9, True, "right 2", "broadcast")))
    three = Standstill("", (issued(5), issued(8, False, "right 2", "broadcast")))
    finding = diagnosed(WAITS, WAITS, two, three)
    assert finding.rank == 3 and len(late(finding)) == 1
    assert late(finding)[0].endswith("it is not in your own code")


def test_a_rank_that_has_issued_nothing_in_the_group_of_all_is_behind_and_in_another_group_it_may_not_belong() -> None:
    assert diagnosed(WAITS, Standstill("load (load.py:3)")).rank == 1
    own = Standstill("train (train.py:30)", (issued(6, True, "left 1"),))
    assert late(diagnosed(own, Standstill("load (load.py:3)"))) == []


def test_ranks_that_wait_in_different_collectives_are_named_all_and_none_is_the_reason() -> None:
    zero = Standstill("", (issued(3, True, "a 1", "broadcast"), issued(7, False, "b 2")))
    one = Standstill("", (issued(2, False, "a 1", "broadcast"), issued(8, True, "b 2")))
    finding = diagnosed(zero, one)
    assert finding.rank is None and finding.title == "training makes no progress"
    assert [text.partition(": ")[2] for text in late(finding)] == [
        "it waits in broadcast 3 of group a 1", "it waits in all_reduce 8 of group b 2",
    ]  # fmt: skip


def test_a_rank_that_waits_in_another_collective_of_the_same_number_is_named() -> None:
    gathers = Standstill("", (issued(6, True, operation="all_gather"),))
    finding = diagnosed(WAITS, gathers, WAITS)
    assert finding.rank is None
    text = "rank 1 has not issued all_reduce 6 of group default_pg 0, in which other ranks wait: it waits in all_gather 6 of group default_pg 0"
    assert late(finding) == [text]


@pytest.mark.parametrize(
    "ranks",
    [
        (WAITS, WAITS),  # what they wait for is on another node
        (WAITS, None),  # it makes progress
        (Standstill("f (a.py:1)"), Standstill("f (a.py:1)")),  # no flight recorder
        (Standstill("", (issued(6),)), Standstill("", (issued(5),))),  # no rank waits in a collective
    ],
)
def test_no_rank_is_named_where_none_is_known_to_be_late(ranks: Any) -> None:
    finding = diagnosed(*ranks)
    assert finding.rank is None and late(finding) == []
    assert "to see where it is blocked" in finding.advice


def test_of_many_late_ranks_three_are_named() -> None:
    finding = diagnosed(*[WAITS] * 4, *[Standstill("", (issued(5),))] * 5)
    assert finding.rank is None and len(late(finding)) == 3


def test_while_a_rank_is_in_a_phase_only_one_that_is_known_to_be_waited_for_is_named_and_no_alert_is_raised() -> None:
    facts = tuple(RankFacts(rank, MeanStep(9, 0.01, 0.0, 0.03), None, WAITS) for rank in range(2))
    window = replace(HEALTHY, stalled_s=60.0, activity="step", ranks=facts, may_wait_for_phase=True)
    assert stalled(window) is None
    late = replace(facts[1], standstill=Standstill("save (save.py:41)", (issued(5),)))
    finding = stalled(replace(window, ranks=(facts[0], late)))
    assert finding is not None and (finding.rank, finding.severity) == (1, "info")
    busy = GpuFacts("0", "GPU-0", utilization_ratio=1.0, power_watts=90.0, power_usual_watts=600.0)
    assert hung(replace(window, gpus=(busy,))) is None
    assert hung(replace(window, gpus=(busy,), may_wait_for_phase=False)) is not None
    assert give_verdict(window).state != "stalled"
    assert give_verdict(replace(window, may_wait_for_phase=False)).state == "stalled"
