"""A report made from a source: numbers checked against what the source was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch.alerting.thresholds import Prices
from gpuwatch.api import Series
from gpuwatch.errors import ConfigError, SourceError
from gpuwatch.formatting import as_json
from gpuwatch.tools.reports.comparison import compare
from gpuwatch.tools.reports.display import energy
from gpuwatch.tools.reports.gather import gather, last_two
from gpuwatch.tools.reports.model import RunReport, from_json, when
from gpuwatch.tools.reports.page import as_html, as_markdown
from tests.unit.reports.fake_source import FINDING, START_S, FakeSource, downsampled, run, steps

NOW_S = START_S + 100


def test_states_shares_and_verdict_are_the_whole_run_s() -> None:
    report = gather(FakeSource(), "resnet", NOW_S)
    assert report.states == {"input_wait": 6.0, "compute": 4.0}
    assert report.shares == {"input_wait": 0.6, "compute": 0.4}
    assert report.duration_s == 10.0
    assert report.verdict.state == "input" and report.verdict.ratio == pytest.approx(0.6)
    assert report.generated_s == NOW_S and report.until_s == START_S + 10


def test_energy_is_that_of_all_ranks_and_names_the_state_that_wastes_most() -> None:
    joules = [{"input_wait": 4.2e6, "compute": 6e6, "startup": 1e5}, {"compute": 0.82e6, "startup": 4e4}]
    report = gather(FakeSource(runs=[run(rank=n, energy_joules=j) for n, j in enumerate(joules)]), "resnet", NOW_S)
    assert report.energy_joules == {"startup": 1.4e5, "input_wait": 4.2e6, "compute": 6.82e6}
    assert "Its GPUs used 3.10 kWh, 38% of it waiting for data." in as_markdown(report)
    assert "<b>3.10 kWh</b><span>used by its GPUs, 38% of it waiting for data</span>" in as_html(report)
    assert from_json(as_json(report).encode(), "here").energy_joules == report.energy_joules
    ranks = [run(rank=n, energy_joules=j, gpus=("NVIDIA A10",)) for n, j in enumerate(joules)]
    priced = gather(FakeSource(runs=ranks), "resnet", NOW_S, Prices(2.0, "EUR", kwh=0.25))
    assert priced.cost is not None and priced.cost.energy == pytest.approx(0.775)
    assert "3.10 kWh, 38% of it waiting for data; the energy cost 0.78 EUR." in as_markdown(priced)
    assert "<span>used by its GPUs for 0.78 EUR, 38% of it waiting for data</span>" in as_html(priced)
    without = gather(FakeSource(), "resnet", NOW_S)
    assert "Its GPUs used" not in as_markdown(without) and "used by its GPUs" not in as_html(without)
    assert energy({"compute": 7200.0}) == "2.00 Wh"


def test_the_mfu_that_is_estimated_is_the_mean_of_the_run() -> None:
    series = [
        {
            "labels": {"run": "host-1-2", "rank": str(rank)},
            "points": [[START_S, value], [START_S + 5, None], [START_S + 9, 0.5]],
        }
        for rank, value in enumerate((0.3, 0.1))
    ]
    report = gather(FakeSource(series={"gpuwatch_run_mfu_estimated_ratio": series}), "resnet", NOW_S)
    assert report.mfu_estimated_ratio == pytest.approx(0.35)
    assert "Its MFU is about 35%, estimated from tensor activity." in as_markdown(report)
    assert "<b>≈ 35%</b><span>MFU, estimated from tensor activity</span>" in as_html(report)
    without = gather(FakeSource(), "resnet", NOW_S)
    assert without.mfu_estimated_ratio is None and "MFU" not in as_markdown(without) + as_html(without)


def test_step_times_leave_first_batches_out() -> None:
    slow_first = steps(101, 0.060, 0.040, data_wait_s=[5.0] + [0.060] * 100)
    found = gather(FakeSource(taken=slow_first), "resnet", NOW_S).step_time
    assert found is not None
    assert found.measured == 100
    assert found.mean_s == pytest.approx(0.1)
    assert found.mean_interval_s == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.data_wait_s == pytest.approx(0.06)
    assert len(found.block_means_s) == 20


def test_steps_that_the_device_measured_are_reported_by_its_clock() -> None:
    on_device = steps(
        50,
        0.060,
        0.040,
        input_wait_s=[0.010] * 50,
        host_wait_s=[0.005] * 50,
        device_transfer_s=[0.002] * 50,
        device_compute_s=[0.083] * 50,
    )
    report = gather(FakeSource(taken=on_device), "resnet", NOW_S)
    assert report.timeline == "device"
    assert report.step_time is not None
    assert report.step_time.mean_s == pytest.approx(0.1)
    assert report.step_time.data_wait_s == pytest.approx(0.010)
    assert report.step_time.transfer_s == pytest.approx(0.002)
    assert report.step_time.compute_s == pytest.approx(0.088)


def test_a_run_without_steps_has_no_step_time() -> None:
    report = gather(FakeSource(runs=[run(steps=0, states={"startup": 3.0})], taken=steps(0, 0.0, 0.0)), "resnet", NOW_S)
    assert report.step_time is None
    assert report.verdict.state == "startup"
    assert report.steps_over_time.time_s == ()


def long_run(old: int = 0, **device: float) -> RunReport:
    taken = replace(steps(20_000, 0.060, 0.040), first_step=1_180_000)
    source = FakeSource([run(steps=1_200_000)], taken, downsampled=downsampled(120, 10_000, old, **device))
    return gather(source, "resnet", NOW_S)


def test_the_plot_of_a_long_run_is_of_all_of_it_and_its_times_say_of_what_they_are() -> None:
    report = long_run()
    over = report.steps_over_time
    assert (over.steps, over.means, len(over.time_s)) == (1_200_000, 0, 120)
    assert over.time_s[0] == START_S and over.time_s[-1] == pytest.approx(START_S + 119_000)
    assert (over.p05_s[0], over.median_s[0], over.p95_s[0], over.data_wait_s[0]) == (0.09, 0.1, 0.2, 0.06)
    assert report.step_time is not None and report.step_time.of_last == 20_000
    assert report.measured_steps == "the last 20,000 of 1,200,000 steps" and report.plotted_steps == ""
    assert report.headline.endswith("1,200,000 steps, the last 20,000 of 100 ms")
    assert "A step (the last 20,000 of 1,200,000 steps) takes 100 ms on average" in as_markdown(report)
    rows = compare(gather(FakeSource(), "resnet", NOW_S), report).rows
    assert ("step times of", "all", "the last 20,000", "") in rows


def test_old_steps_are_means_and_the_plot_says_so() -> None:
    report = long_run(old=60)
    over = report.steps_over_time
    assert over.means == 60
    assert over.p05_s[59] == over.median_s[59] == over.p95_s[59] == pytest.approx(0.1)
    assert over.p95_s[60] == 0.2
    assert report.plotted_steps.startswith(f"up to {when(START_S + 60_000)} means only: single steps")
    assert "Up to 20" in as_html(report)


def test_the_devices_times_are_plotted_where_it_measured() -> None:
    device = {"input_wait_s": 0.02, "device_transfer_s": 0.01, "device_compute_s": 0.05, "host_wait_s": 0.01}
    over = long_run(old=120, **device).steps_over_time
    assert over.data_wait_s[0] == 0.02 and over.median_s[0] == pytest.approx(0.09)


def test_a_run_whose_records_all_came_but_a_few_is_whole() -> None:
    report = gather(FakeSource([run(steps=101)]), "resnet", NOW_S)
    assert report.step_time is not None and report.step_time.of_last is None
    assert report.steps_over_time.steps == 100 and report.measured_steps == report.plotted_steps == ""


def test_a_run_of_which_no_single_steps_are_kept_has_a_plot_of_means() -> None:
    report = gather(
        FakeSource([run(steps=1200)], steps(0, 0.0, 0.0), downsampled=downsampled(12, 100, old=12)), "resnet", NOW_S
    )
    assert report.step_time is None and report.steps_over_time.means == 12
    assert report.plotted_steps == "means only: single steps from then are no longer stored"
    (output, *_) = compare(report, gather(FakeSource([run(name="b")]), "b", NOW_S)).outcome
    assert output == "speed not compared: single steps of resnet are no longer stored"


def counter(state: str, *points: tuple[float, float], rank: str = "0") -> dict[str, object]:
    labels = {"run": "host-1-2", "rank": rank, "state": state}
    return {"labels": labels, "points": [[START_S + at, value] for at, value in points]}


def test_the_ledger_over_time_is_the_growth_of_all_ranks_counters() -> None:
    series = [
        counter("input_wait", (2, 1.0), (4, 2.0), (6, 2.5), (8, 2.5)),
        counter("compute", (2, 0.5), (4, 1.5), (6, 3.0), (8, 3.0)),
        counter("compute", (4, 2.0), (6, 4.0), (8, 4.0), rank="1"),
    ]
    over = gather(FakeSource(series={"gpuwatch_run_seconds_total": series}), "resnet", NOW_S).over_time
    assert over.end_s == (START_S + 2, START_S + 4, START_S + 6)  # in the last interval nothing was booked
    assert over.states == {"input_wait": (1.0, 1.0, 0.5), "compute": (0.5, 3.0, 3.5)}


def test_ranks_are_summed_and_kept() -> None:
    ranks = [run(), run(rank=1, host="node-18", status="lost", states={"compute": 10.0}, samples=None)]
    report = gather(FakeSource(runs=ranks), "resnet", NOW_S)
    assert report.states == {"input_wait": 6.0, "compute": 14.0}
    assert [rank.host for rank in report.ranks] == ["node-17", "node-18"]
    assert report.status == "lost"
    assert report.samples == 3200


def test_gpus_are_those_of_all_ranks() -> None:
    ranks = [run(rank=0, gpus=("H200", "")), run(rank=1, gpus=("A100",))]
    assert gather(FakeSource(runs=ranks), "resnet", NOW_S).gpus == ("H200", "GPU", "A100")


def test_findings_of_one_cause_become_one_with_its_episodes() -> None:
    later = {**FINDING, "since_s": START_S + 20, "seen_s": START_S + 25, "ratio": 0.3}
    (found,) = gather(FakeSource(findings=[later, FINDING]), "resnet", NOW_S).findings
    assert found.episodes == ((START_S + 1, START_S + 9), (START_S + 20, START_S + 25))
    assert found.active_s == 13.0
    assert found.ratio == 0.3  # its last value


def test_what_ended_the_run_comes_first_though_it_was_there_for_a_moment() -> None:
    long = {**FINDING, "seen_s": START_S + 5000}
    end = {**FINDING, "cause": "worker_killed", "ratio": 1.0, "since_s": START_S + 5000, "seen_s": START_S + 5000}
    found = gather(FakeSource(findings=[long, end]), "resnet", NOW_S).findings
    assert [each.cause for each in found] == ["worker_killed", "input_cpu"]


def test_roots_come_by_what_they_cost_and_consequences_follow_them() -> None:
    long = {**FINDING, "cause": "eval_share", "ratio": 0.4, "seen_s": START_S + 900}
    hanging = {**FINDING, "cause": "burst_every_n", "root": "input_cpu", "ratio": 0.9, "seen_s": START_S + 5000}
    orphan = {**FINDING, "cause": "stalled", "root": "hung", "ratio": 0.01}
    info = {**FINDING, "cause": "gpu_saturated", "severity": "info", "seen_s": START_S + 9000}
    found = gather(FakeSource(findings=[info, hanging, FINDING, orphan, long]), "resnet", NOW_S).findings
    assert [each.cause for each in found] == ["eval_share", "input_cpu", "burst_every_n", "stalled", "gpu_saturated"]
    assert [each.root for each in found] == [None, None, "input_cpu", None, None]


def test_a_run_is_compared_with_the_one_before_of_its_name() -> None:
    runs = [run(run=f"resnet-{n}", started_s=START_S + n, last_message_s=START_S + n + 9) for n in range(3)]
    ranks = [run(run="resnet-2", rank=1, started_s=START_S + 1.5)]
    source = FakeSource(
        runs=[runs[1], *ranks, runs[0], run(run="other", name="bert", started_s=START_S + 1.9), runs[2]]
    )
    assert last_two(source, "resnet") == ("resnet-1", "resnet-2")
    assert last_two(source, "resnet-1") == ("resnet-0", "resnet-1")
    with pytest.raises(ConfigError, match="has no run before resnet-0 that is called 'resnet'; name"):
        last_two(source, "resnet-0")


def test_what_the_run_concluded_at_its_end_comes_first_in_its_words() -> None:
    def each(**changes: Any) -> dict[str, Any]:
        return {**FINDING, **changes}

    short = each(cause="input_cpu", advice="make a batch cheaper", seen_s=START_S + 2)
    same_alert = each(cause="input_latency", ratio=0.9, seen_s=START_S + 900)
    vague = each(cause="gpu_saturated", severity="info")
    other = each(cause="straggler", seen_s=START_S + 900)
    end = each(cause="worker_killed", ratio=1.0)
    concluded = {"verdict": {"state": "input", "ratio": 0.4, "sentence": "input-bound: 40%"},
                 "findings": [each(cause="eval_share", rank=None), each(cause="input_cpu", rank=None)]}  # fmt: skip
    source = FakeSource(runs=[run(conclusion=concluded)], findings=[short, same_alert, vague, other, end])
    report = gather(source, "resnet", NOW_S)
    assert report.verdict.sentence == "input-bound: 40%"
    assert [each.cause for each in report.findings] == ["worker_killed", "eval_share", "input_cpu", "straggler"]
    assert report.findings[2].advice == "num_workers 4 → 10" and report.findings[2].active_s == 1.0
    assert report.findings[1].active_s == 10.0, "of the whole run"
    two = [run(conclusion=concluded), run(rank=1, states={"compute": 10.0})]
    assert gather(FakeSource(runs=two), "resnet", NOW_S).verdict.ratio == pytest.approx(0.3), (
        "rank 0 has not compared them"
    )


def test_a_run_is_found_by_id_by_name_or_as_the_last_one() -> None:
    runs = [run(), run(run="other", name="bert", last_message_s=START_S + 50), run(run="old", last_message_s=START_S)]
    source = FakeSource(runs=runs)
    assert gather(source, "last", NOW_S).run == "other"
    assert gather(source, "resnet", NOW_S).run == "host-1-2"  # of two of that name, the one heard last
    assert gather(source, "old", NOW_S).run == "old"
    with pytest.raises(ConfigError, match=r"the test has no run 'resnt'; did you mean resnet\?"):
        gather(source, "resnt", NOW_S)
    with pytest.raises(ConfigError, match="has no run yet"):
        gather(FakeSource(runs=[]), "last", NOW_S)


def test_a_report_survives_its_json() -> None:
    report = gather(FakeSource(findings=[FINDING]), "resnet", NOW_S)
    assert from_json(as_json(report).encode(), "a.json") == report


@pytest.mark.parametrize(
    ("text", "why"), [("{}", "missing required field"), ("no json", "malformed"), ("[1]", "Expected `object`")]
)
def test_a_file_that_is_no_report_is_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.json is not a report") as raised:
        from_json(text.encode(), "a.json")
    assert why in str(raised.value)


def test_a_report_of_another_schema_is_refused() -> None:
    text = as_json(gather(FakeSource(), "resnet", NOW_S)).replace("gpuwatch-report/1", "gpuwatch-report/9")
    with pytest.raises(ConfigError, match="gpuwatch-report/9"):
        from_json(text.encode(), "a.json")


class RefusingAgent(FakeSource):
    """Refuses what an agent refuses: gpuwatch_agent/history/queries.py, `_span`."""

    def series(self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int) -> list[Series]:
        if start_s > end_s:
            raise SourceError(
                "the agent answered /api/v1/series with status 400", f"start={start_s} is after end={end_s}", 400
            )
        return super().series(metric, labels, start_s, end_s, points)


def test_a_run_whose_clock_was_set_back_has_a_report() -> None:
    """Ten seconds, of which the clock went back an hour: no report, "start=… is after end=…"."""
    report = gather(
        RefusingAgent([run(status="running", watermark_s=START_S - 3590, last_message_s=START_S - 3590)]),
        "last",
        START_S - 3590,
    )
    assert report.until_s - report.started_s == pytest.approx(10.0), "as its ledger has it"
    assert report.headline.startswith("resnet · 10.0 s, 100 steps")
    assert "input-bound: 60%" in as_html(report) and "10.0 s, 100 steps" in as_markdown(report)
