"""Queries over an agent's samples: rates, resets, gaps, divisions."""

from __future__ import annotations

import pytest

from gpuwatch.api import Points, Series
from gpuwatch_dashboards.query import Line, Match, Query, Scope, evaluate, render

LEDGER = "gpuwatch_run_seconds_total"


def series(values: list[float | None], start_s: float = 100.0, spacing_s: float = 1.0, **labels: str) -> Series:
    return Series(labels, tuple((start_s + n * spacing_s, value) for n, value in enumerate(values)))


def values(trace: Series) -> list[float | None]:
    return [value for _, value in trace.points]


def rates(points: Points) -> Points:
    return Line.of(points).rates().points()


def with_gaps(points: Points) -> Points:
    return Line.of(points).points()


def test_rate_is_the_difference_over_the_interval_at_its_end() -> None:
    assert rates(((10.0, 1.0), (12.0, 4.0), (14.0, 4.0))) == ((12.0, 1.5), (14.0, 0.0))


def test_total_of_a_counter_is_its_value_on_pages_and_in_prometheus() -> None:
    query = Query("gpuwatch_job_attempts_total", ("job_id",), total=True)
    raw = {"gpuwatch_job_attempts_total": [series([1.0, 1.0, 2.0], job_id="7")]}
    assert [values(trace) for trace in evaluate(query, raw)] == [[1.0, 1.0, 2.0]]
    assert render(query, Scope(), "1m") == "sum by (instance, job_id) (gpuwatch_job_attempts_total{})"


def test_counter_that_was_reset_grew_by_what_it_says_now() -> None:
    assert rates(series([5.0, 6.0, 0.5, 1.5]).points) == ((101.0, 1.0), (102.0, 0.5), (103.0, 1.0))


def test_interval_over_a_gap_has_no_rate() -> None:
    points: Points = ((0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (30.0, 30.0), (31.0, 31.0))
    assert rates(points) == ((1.0, 1.0), (2.0, 1.0), (31.0, 1.0))


def test_gap_interrupts_the_line() -> None:
    assert with_gaps(((0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (12.0, 1.0))) == (
        (0.0, 1.0),
        (1.0, 1.0),
        (2.0, 1.0),
        (7.0, None),
        (12.0, 1.0),
    )


def test_share_of_each_state() -> None:
    raw = {
        LEDGER: [
            series([0.0, 0.6, 1.2], run="r", rank="0", state="input_wait"),
            series([0.0, 0.2, 0.4], run="r", rank="0", state="compute"),
            series([0.0, 0.0, 0.0], run="r", rank="0", state="eval"),
        ]
    }
    traces = {
        t.labels["state"]: values(t) for t in evaluate(Query(LEDGER, by=("state",), over=Query(LEDGER)), raw)
    }  # fmt: skip
    assert traces["input_wait"] == pytest.approx([0.75, 0.75])
    assert traces["compute"] == pytest.approx([0.25, 0.25])
    assert traces["eval"] == [0.0, 0.0]


def test_interval_without_a_step_has_no_step_time_and_no_gap() -> None:
    raw = {
        "gpuwatch_step_phase_seconds_total": [series([0.0, 0.5, 0.5, 1.5, 2.0], phase="compute")],
        "gpuwatch_steps_total": [series([0.0, 1.0, 1.0, 3.0, 4.0])],
    }
    query = Query("gpuwatch_step_phase_seconds_total", by=("phase",), over=Query("gpuwatch_steps_total"))
    assert [t.points for t in evaluate(query, raw)] == [((101.0, 0.5), (103.0, 0.5), (104.0, 0.5))]


def test_series_of_a_group_are_summed_and_the_others_left_out() -> None:
    raw = {
        "gpuwatch_network_receive_bytes_total": [
            series([0.0, 10.0], device="eth0"),
            series([0.0, 5.0], device="eth1"),
            series([0.0, 1000.0], device="lo"),
            series([0.0, 1000.0], device="veth12"),
        ]
    }
    query = Query("gpuwatch_network_receive_bytes_total", where=(Match("device", "!~", "lo|veth.*"),))
    assert [values(t) for t in evaluate(query, raw)] == [[15.0]]


def test_of_several_ranks_the_slowest_counts_not_their_sum() -> None:
    metric = "gpuwatch_step_percentile_seconds"
    ranks = [series([0.1, 0.3], rank="0", percentile="p95"), series([0.2, 0.2], rank="1", percentile="p95")]
    query = Query(metric, by=("percentile",), greatest=True)
    assert [values(t) for t in evaluate(query, {metric: ranks})] == [[0.2, 0.3]]
    assert render(query, Scope("r1", "0|1"), "1m").startswith(f"max by (percentile) ({metric}{{")


def test_divisor_is_found_by_its_own_labels() -> None:
    used, total = "gpuwatch_gpu_memory_used_bytes", "gpuwatch_gpu_memory_total_bytes"
    raw = {
        used: [series([10.0], gpu="0", UUID="a"), series([10.0], gpu="1", UUID="b"), series([1.0], gpu="2", UUID="c")],
        total: [series([20.0], gpu="0", UUID="a"), series([40.0], gpu="1", UUID="b")],
    }
    traces = evaluate(Query(used, by=("gpu", "UUID"), over=Query(total, by=("gpu", "UUID"))), raw)
    assert {t.labels["gpu"]: t.last for t in traces} == {"0": 0.5, "1": 0.25}


def test_what_was_not_measured_gives_no_line() -> None:
    assert evaluate(Query("gpuwatch_gpu_utilization_ratio", by=("gpu",)), {}) == []
    assert evaluate(Query("gpuwatch_load1"), {"gpuwatch_load1": [series([None, None])]}) == []


@pytest.mark.parametrize(
    ("op", "value", "kept"),
    [("=", "a", "a"), ("!=", "a", "bc"), ("=~", "a|b", "ab"), ("!~", "a|b", "c"), ("=~", "", "")],
)
def test_match_as_in_promql(op: str, value: str, kept: str) -> None:
    assert "".join(x for x in "abc" if Match("l", op, value)({"l": x})) == kept  # type: ignore[arg-type]
