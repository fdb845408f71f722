"""Which series are on /metrics and until when.

What stays at 0 is not there, a first rise has a 0 before it, and ended runs go once they were scraped.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuwatch.metrics import Sample
from gpuwatch_agent.exporter import Served
from gpuwatch_agent.runs import ENDED, LOST, RUNNING, Run

GPU = ("0", "GPU-0")
STATES, WATERMARK = "gpuwatch_gpu_seconds_total", "gpuwatch_gpu_ledger_watermark_timestamp_seconds"
Shown = dict[str, float]


class Ticks:
    """An agent's ticks, a second each, with a GPU's ledger and some other samples."""

    def __init__(self, full: bool = False, scraped: bool = True) -> None:
        self.served, self.totals, self.time_s = Served(full), dict.fromkeys(("compute", "eval", "stalled"), 0.0), 0
        if scraped:
            self.tick()
            self.take()

    def tick(self, state: str = "compute", *more: Sample, runs: tuple[Run, ...] = ()) -> Shown:
        self.time_s += 1
        self.totals[state] += 1.0
        self.whole, self.over = self.served.runs(runs, 1000.0 + self.time_s)
        ledger = [Sample(STATES, value, (*GPU, name)) for name, value in self.totals.items()]
        self.page = self.served.page([*ledger, Sample(WATERMARK, float(self.time_s), GPU), *more])
        states = self.page.values(STATES)
        assert sum(states.values()) <= self.page.values(WATERMARK)[GPU], "no state is ahead of the watermark"
        return {key[2]: value for key, value in states.items()} | {"": self.page.values(WATERMARK)[GPU]}

    def take(self, times: int = 1) -> None:
        self.page.taken += times

    def value(self, metric: str, *labels: str) -> float | None:
        return self.page.values(metric).get(labels)


def test_a_state_that_was_never_seen_is_not_served() -> None:
    assert Ticks().tick() == {"compute": 2.0, "": 2.0}


@pytest.mark.parametrize("takes", [(1, 1), (0, 0, 2), (0, 1, 0, 0, 1)])
def test_the_whole_ledger_waits_until_two_scrapes_have_taken_a_new_state_s_0(takes: tuple[int, ...]) -> None:
    ticks = Ticks()
    before = ticks.tick()
    for taken in takes:
        assert ticks.tick("eval") == {**before, "eval": 0.0}
        ticks.take(taken)
    after = ticks.tick("eval")
    assert after == {"compute": 2.0, "eval": len(takes) + 1.0, "": len(takes) + 3.0}
    assert sum(after[state] for state in ("compute", "eval")) == after[""], "and it adds up again"


def test_a_second_new_state_makes_it_wait_for_two_more() -> None:
    ticks = Ticks()
    ticks.tick("eval")
    ticks.take()
    assert ticks.tick("stalled") == {"compute": 1.0, "eval": 0.0, "stalled": 0.0, "": 1.0}
    ticks.take()
    assert ticks.tick()["eval"] == 0.0
    ticks.take()
    assert ticks.tick() == {"compute": 3.0, "eval": 1.0, "stalled": 1.0, "": 5.0}


def test_what_a_new_agent_s_first_page_has_is_served_as_it_is() -> None:
    """Restored totals: a 0 before them would be a counter's restart, and count them twice."""
    ticks = Ticks(scraped=False)
    ticks.totals |= {"compute": 500.0, "eval": 90.0}
    ticks.time_s = 590
    assert ticks.tick() == {"compute": 501.0, "eval": 90.0, "": 591.0}
    ticks.take()
    assert ticks.tick()["compute"] == 502.0


def test_without_a_scraper_nothing_waits() -> None:
    ticks = Ticks(scraped=False)
    ticks.tick()
    assert ticks.tick("eval")["eval"] == 1.0
    ticks = Ticks()
    ticks.tick("eval")
    for _ in range(119):
        assert ticks.tick("eval")["eval"] == 0.0 or ticks.time_s > 120
    assert ticks.tick("eval")["eval"] == 121.0, "the scraper is gone"


def test_a_gpu_s_state_goes_a_quarter_of_an_hour_after_its_last_second_and_comes_back_as_it_was() -> None:
    ticks = Ticks()
    ticks.tick("eval")
    ticks.take(2)
    for _ in range(899):
        shown = ticks.tick()
        ticks.take()
    assert shown["eval"] == 1.0
    assert "eval" not in ticks.tick()
    ticks.take()
    assert ticks.tick("eval")["eval"] == 1.0, "first its old value, or `increase` would miss or double it"
    ticks.take(2)
    assert ticks.tick("eval")["eval"] == 3.0


def test_the_energy_of_a_kind_goes_with_its_last_joule_and_comes_back_as_it_was() -> None:
    ticks, energy = Ticks(), "gpuwatch_gpu_energy_joules_total"

    def idle(joules: float) -> float | None:
        ticks.tick("compute", Sample(energy, joules, (*GPU, "idle")), Sample(energy, ticks.time_s, (*GPU, "working")))
        return ticks.value(energy, *GPU, "idle")

    idle(5.0)
    for _ in range(899):
        ticks.take()
        shown = idle(5.0)
    assert (shown, idle(5.0)) == (5.0, None) and ticks.value(energy, *GPU, "working") is not None
    ticks.take()
    assert idle(7.0) == 5.0
    ticks.take(2)
    assert idle(9.0) == 9.0


def test_states_of_a_run_that_rules_compare_are_there_at_0_and_none_goes() -> None:
    ticks = Ticks()
    states = {"compute": 0.0, "input_wait": 0.0, "startup": 3.0, "stalled": 0.0}

    def shown() -> Mapping[tuple[str, ...], float]:
        ticks.tick(
            "compute",
            *(Sample("gpuwatch_run_seconds_total", value, ("r", "0", state)) for state, value in states.items()),
        )
        return ticks.page.values("gpuwatch_run_seconds_total")

    assert shown() == {("r", "0", "compute"): 0, ("r", "0", "input_wait"): 0, ("r", "0", "startup"): 3}
    for _ in range(1000):
        ticks.take()
        assert len(shown()) == 3


def test_an_error_s_first_count_has_a_0_before_it_and_a_gauge_stays_once_it_was_seen() -> None:
    ticks = Ticks()

    def at(errors: float, hot: float) -> tuple[float | None, float | None]:
        throttled = [Sample("gpuwatch_gpu_throttled", hot, (*GPU, reason)) for reason in ("thermal", "sync_boost")]
        ticks.tick("compute", Sample("gpuwatch_gpu_xid_errors_total", errors, GPU), *throttled)
        assert ticks.value("gpuwatch_gpu_throttled", *GPU, "sync_boost") is None
        return ticks.value("gpuwatch_gpu_xid_errors_total", *GPU), ticks.value(
            "gpuwatch_gpu_throttled", *GPU, "thermal"
        )

    assert at(0, 0) == (None, None)
    ticks.take()
    assert at(2, 1) == (0.0, 0.0)
    ticks.take(2)
    assert at(2, 1) == (2.0, 1.0)
    assert at(2, 0) == (2.0, 0.0)


def test_only_full_has_what_is_history_or_full() -> None:
    more = [Sample("gpuwatch_gpu_sm_clock_hertz", 1e9, GPU), Sample("gpuwatch_run_threads", 4, ("r", "0"))]
    more.append(Sample("gpuwatch_gpu_memory_used_bytes", 0.0, GPU))  # a gauge that is always served may be 0
    for full in (False, True):
        ticks = Ticks(full)
        shown = ticks.tick("compute", *more)
        body = ticks.page.body(False, False).decode()
        assert ("sm_clock" in body, "run_threads" in body) == (full, full)
        assert "memory_used_bytes" in body and ("stalled" in shown) is full


@pytest.mark.parametrize(("status", "said_s"), [(ENDED, 120), (LOST, 300)])
def test_an_ended_run_goes_when_two_scrapes_have_taken_its_end(status: str, said_s: int) -> None:
    ticks, run = Ticks(), Run("r", 0, "boot")
    ticks.tick(runs=(run,))
    ticks.take()
    assert ticks.whole == {run.key}
    run.status, run.ended_s = status, 1000.0 + ticks.time_s
    for taken in (1, 0, 1):
        ticks.tick(runs=(run,))
        assert (ticks.whole, ticks.over) == ({run.key}, set())
        ticks.take(taken)
    ended_tick = ticks.time_s - 2
    ticks.tick(runs=(run,))
    assert (ticks.whole, ticks.over) == (set(), {run.key})
    while ticks.over:
        ticks.tick(runs=(run,))
    assert said_s - 2 <= ticks.time_s - ended_tick <= said_s + 1
    run.status, run.ended_s = RUNNING, None
    ticks.tick(runs=(run,))
    assert ticks.whole == {run.key}, "it goes on: an elastic restart"


def test_an_attempt_that_began_and_ended_within_a_tick_is_served_until_its_end_was_taken() -> None:
    """A run that was lost is resumed: no tick has seen it running in between."""
    ticks, run = Ticks(), Run("r", 0, "boot")
    ticks.tick(runs=(run,))
    for status in (LOST, ENDED):
        run.status, run.ended_s = status, 1000.0 + ticks.time_s
        for _ in range(2):
            ticks.tick(runs=(run,))
            assert ticks.whole == {run.key}
            ticks.take()
        ticks.tick(runs=(run,))
        assert ticks.whole == set()


def test_a_run_that_ended_in_a_new_state_goes_when_its_last_values_were_taken() -> None:
    ticks, run = Ticks(), Run("r", 0, "boot")

    def tick(saved_s: float) -> float | None:
        states = {"compute": 9.0, "checkpoint": saved_s}
        ticks.tick(
            "compute",
            *(Sample("gpuwatch_run_seconds_total", value, ("r", "0", state)) for state, value in states.items()),
            runs=(run,),
        )
        return ticks.value("gpuwatch_run_seconds_total", "r", "0", "checkpoint")

    tick(0.0)
    assert tick(0.7) == 0.0
    run.status, run.ended_s = ENDED, 1000.0 + ticks.time_s
    for expected in (0.0, 0.0, 0.7, 0.7):
        assert (tick(0.7), run.key in ticks.whole) == (expected, True)
        ticks.take()
    tick(0.7)
    assert ticks.whole == set()


def test_an_ended_run_that_is_not_scraped_goes_after_two_minutes() -> None:
    ticks, run = Ticks(), Run("r", 0, "boot")
    run.status, run.ended_s = ENDED, 1000.0 + ticks.time_s
    served = 0
    for _ in range(300):
        ticks.tick(runs=(run,))
        served += run.key in ticks.whole
    assert 118 <= served <= 120


@pytest.mark.parametrize(("taken", "least_s", "most_s"), [(False, 298, 300), (True, 118, 120)])
def test_the_end_of_a_run_is_served_for_five_minutes_unless_it_was_scraped(
    taken: bool, least_s: int, most_s: int
) -> None:
    """It is kept for the time that Prometheus restarts or does not reach the node.

    Otherwise the run's series would vanish as if its process had died.
    """
    ticks, run = Ticks(), Run("r", 0, "boot")
    run.status, run.ended_s = ENDED, 1000.0 + ticks.time_s
    served = 0
    for _ in range(400):
        ticks.tick(runs=(run,))
        ticks.take(taken)
        served += run.key in ticks.whole | ticks.over
    assert least_s <= served <= most_s
