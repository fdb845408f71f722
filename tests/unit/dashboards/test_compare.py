"""The page "Compare": what its plot of step times covers, and what it says of that."""

from __future__ import annotations

from msgspec.structs import replace

from gpuwatch.tools.reports.gather import gather
from gpuwatch_dashboards.views.compare import steps_card
from tests.unit.reports.fake_source import START_S, FakeSource, downsampled, run, steps


def compared(old: int) -> tuple[list[list[float]], str]:
    """Return the points of a run of 1,200,000 steps, the first `old` of 120 buckets long ago, and the card's head."""
    taken = replace(steps(20_000, 0.060, 0.040), first_step=1_180_000)
    source = FakeSource([run(steps=1_200_000)], taken, downsampled=downsampled(120, 10_000, old))
    card = steps_card([gather(FakeSource(), "resnet", START_S), gather(source, "resnet", START_S)])
    assert card.option is not None
    return card.option["series"][1]["data"], card.head


def test_a_run_of_more_steps_than_a_report_takes_is_drawn_from_its_start() -> None:
    points, head = compared(old=0)
    assert len(points) == 120 and points[0] == [0.0, 100.0]
    assert points[-1] == [33.056, 100.0]  # hours, ms
    assert "no longer stored" not in head and "the last 20,000" not in head


def test_where_it_is_of_means_alone_the_card_says_so() -> None:
    points, head = compared(old=60)
    assert len(points) == 120
    assert "resnet: up to 2026-" in head and "means only: single steps from then are no longer stored." in head
