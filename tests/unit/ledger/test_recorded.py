"""Recorded timelines of real GPUs, replayed through the real `Watch`: its ledger against the recordings' own times."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recorded.__main__ import main
from benchmarks.recorded.replay import BOUND_POINTS, BOUND_STEP_MS, Host, ReplayEvents, compare
from benchmarks.recorded.trace import STATES, Op, TraceError, load, parse, true_times

TRACES = Path(__file__).parents[2] / "fixtures" / "traces"
TABLE = {
    "ddp-resnet18-mi300x": (4, 8.76, 0.00, 0.00),
    "ddp-v100": (6, 96.36, 0.02, 0.06),
    "h100-gpt-compiled": (40, 11.65, 10.17, 0.00),
    "h100-gpt-cudagraphs": (40, 15.65, 32.63, 0.00),
    "h100-resnet18-workers12": (40, 24.71, 31.14, 0.54),
    "linear-2080ti": (39, 36.94, 0.00, 0.00),
    "owlv2-mi300x-inference": (6, 30.29, 64.23, 0.00),
    "resnet-2080ti-starved": (30, 33.31, 46.86, 10.87),
    "resnet50-autograd-workers4": (6, 17.06, 1.41, 0.13),
    "resnet50-v100-workers0-a": (6, 64.79, 22.58, 6.77),
    "resnet50-v100-workers4-a": (6, 72.59, 0.84, 0.17),
    "resnet50-workers0-b": (6, 49.92, 22.03, 2.39),
    "resnet50-workers4-b": (6, 61.83, 0.52, 0.37),
}
"""Steps, and by another program than ours: device busy, exposed and hidden wait in percent of the window."""
MS = 1_000_000


@functools.cache
def compared(name: str) -> dict[str, Any]:
    return compare(load(TRACES / f"{name}.json.gz"))


def test_every_fixture_is_in_the_table() -> None:
    assert sorted(path.name.removesuffix(".json.gz") for path in TRACES.glob("*.gz")) == sorted(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_the_truth_is_what_another_program_computed(name: str) -> None:
    steps, busy, exposed, hidden = TABLE[name]
    trace = load(TRACES / f"{name}.json.gz")
    truth = true_times(trace)
    assert len(trace.fetches) == steps
    assert truth.percent(truth.busy_ns) == pytest.approx(busy, abs=0.05)
    assert truth.percent(truth.states_ns["input_wait"]) == pytest.approx(exposed, abs=0.05)
    assert truth.percent(truth.hidden_ns) == pytest.approx(hidden, abs=0.05)
    assert sum(truth.states_ns.values()) == truth.window_ns


@pytest.mark.parametrize("name", TABLE)
def test_each_state_is_within_a_point_of_the_recording(name: str) -> None:
    difference = compared(name)["difference"]
    assert {state: by for state, by in difference.items() if abs(by) > BOUND_POINTS} == {}


@pytest.mark.parametrize("name", TABLE)
def test_the_input_wait_of_each_step_is_within_50_microseconds(name: str) -> None:
    row = compared(name)
    assert len(row["input_wait_errors_ms"]) == TABLE[name][0]
    assert row["input_wait_error_ms"] <= BOUND_STEP_MS


@pytest.mark.parametrize("pair", ["v100-workers{}-a", "workers{}-b"])
def test_the_predicted_gain_has_the_one_that_was_measured(pair: str) -> None:
    """The same training was recorded without workers and with four.

    The ratio of its median steps is the gain that four workers brought.
    """
    steps_ns = []
    for workers in (0, 4):
        asked = [begin for begin, _ in load(TRACES / f"resnet50-{pair.format(workers)}.json.gz").fetches]
        steps_ns.append(median(after - before for before, after in pairwise(asked)))
    gain = steps_ns[0] / steps_ns[1]
    assert 1.15 < gain < 1.25
    (finding,) = (each for each in compared(f"resnet50-{pair.format(0)}")["findings"] if each["predicted_range"])
    low, high = finding["predicted_range"]
    assert finding["cause"] == "input_single_process"
    assert low - 0.005 <= gain <= high + 0.005


# Made-up timelines: what the recorded ones do not have --------------------------------------------------------------


def a_trace(**changes: Any) -> dict[str, Any]:
    """Return a file of two steps of 10 ms: 1 ms of fetch, 2 ms of copy, 5 ms of kernels, 2 ms of other host work."""
    raw: dict[str, Any] = {
        "name": "made-up",
        "real_loader": True,
        "home_stream": "7",
        "fetches": [[0, 1 * MS], [10 * MS, 11 * MS]],
        "copies": [[1 * MS, 3 * MS, "7"], [11 * MS, 13 * MS, "7"]],
        "optimizer_steps": [[4 * MS, 5 * MS], [14 * MS, 15 * MS]],
        "ops": [
            [1 * MS, 1 * MS, 3 * MS, "7", "transfer"],
            [3 * MS, 3 * MS, 8 * MS, "7", "compute"],
            [11 * MS, 11 * MS, 13 * MS, "7", "transfer"],
            [13 * MS, 13 * MS, 18 * MS, "7", "compute"],
        ],
    }
    return raw | changes


def test_the_truth_of_a_made_up_trace() -> None:
    truth = true_times(parse(a_trace(), "x"))
    assert truth.window_ns == 18 * MS
    assert truth.states_ns == {"input_wait": 2 * MS, "transfer": 4 * MS, "compute": 10 * MS, "host_wait": 2 * MS}
    assert (truth.busy_ns, truth.hidden_ns, truth.compute_idle_ns) == (14 * MS, 0, 0)
    assert truth.input_waits_ns == [(MS, MS), (MS, MS)]


def test_a_made_up_trace_is_replayed_exactly() -> None:
    row = compare(parse(a_trace(), "x"))
    assert row["exceeded"] == []
    assert {state: round(by, 3) for state, by in row["difference"].items() if abs(by) >= 0.001} == {}


def shifted(raw: dict[str, Any], by_ns: int) -> dict[str, Any]:
    """Return the file with all its times moved."""
    moved = dict(raw)
    for key, fields in (("fetches", 2), ("copies", 2), ("optimizer_steps", 2), ("ops", 3)):
        moved[key] = [[*(at + by_ns for at in row[:fields]), *row[fields:]] for row in raw[key]]
    return moved


def of_kernels(*spans: tuple[int, int, int], stream: str = "7") -> list[list[Any]]:
    """Return kernels, each (launch, begin, end) in ms."""
    return [
        [launch if launch < 0 else launch * MS, begin * MS, end * MS, stream, "compute"] for launch, begin, end in spans
    ]


@pytest.mark.parametrize(
    ("changes", "states_ms"),
    [
        pytest.param({"ops": []}, (2, 0, 0, 9), id="nothing runs on the device"),
        pytest.param({"optimizer_steps": [], "copies": [], "ops": []}, (2, 0, 0, 9), id="only fetches"),
        pytest.param({"fetches": [[0, MS]], "copies": []}, (1, 4, 13, 0), id="one step"),
        pytest.param({"fetches": [[0, MS], [18 * MS, 25 * MS]]}, (8, 4, 13, 0), id="a fetch with nothing after it"),
        pytest.param({"fetches": [[0, MS], [10 * MS, 10 * MS]]}, (1, 4, 11, 2), id="an instant fetch"),
        pytest.param({"fetches": [[0, 12 * MS], [10 * MS, 11 * MS]]}, (4, 4, 10, 0), id="fetches that overlap"),
        pytest.param({"copies": [[MS, 3 * MS, "7"], [2 * MS, 4 * MS, "9"]]}, (2, 4, 10, 2), id="copies that overlap"),
        pytest.param({"copies": [[-5 * MS, 2 * MS, "7"], [9 * MS, 12 * MS, "7"]]}, (2, 4, 10, 2), id="copies across a fetch"),
        pytest.param({"ops": of_kernels((-1, -4, 5), (6, 6, 9))}, (1, 0, 9, 1), id="launched before the recording"),
    ],
)  # fmt: skip
def test_the_truth_of_odd_traces(changes: dict[str, Any], states_ms: tuple[int, ...]) -> None:
    truth = true_times(parse(a_trace(**changes), "x"))
    assert tuple(truth.states_ns[state] / MS for state in STATES) == states_ms
    assert sum(truth.states_ns.values()) == truth.window_ns


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": []},
        {"optimizer_steps": [], "copies": [], "ops": []},
        {"fetches": [[0, MS]], "copies": []},
        {"fetches": [[0, MS], [18 * MS, 25 * MS]]},
        {"fetches": [[0, 0], [0, 0], [10 * MS, 10 * MS], [10 * MS, 10 * MS]], "real_loader": False},
        {"fetches": [[0, 12 * MS], [10 * MS, 11 * MS]]},
        {"copies": [[MS, 3 * MS, "7"], [2 * MS, 4 * MS, "9"], [2 * MS, 2 * MS, "7"]]},
        {"copies": [[-5 * MS, 2 * MS, "7"], [9 * MS, 12 * MS, "7"], [17 * MS, 40 * MS, "7"]]},
        {"optimizer_steps": [[-2 * MS, -MS], [0, 1], [9 * MS, 10 * MS], [10 * MS, 99 * MS]]},
        {"ops": of_kernels((-1, -4, 5), (6, 6, 9))},
        {"ops": of_kernels((2, 2, 9), (12, 12, 18), stream="20")},
    ],
)
def test_any_trace_is_replayed_to_its_end_and_closes(changes: dict[str, Any]) -> None:
    for by_ns in (0, -7 * MS):
        raw = shifted(a_trace(**changes), by_ns if not any(op[0] == -1 for op in changes.get("ops", ())) else 0)
        row = compare(parse(raw, "x"))
        assert len(row["input_wait_errors_ms"]) == row["steps"] == len(raw["fetches"])
        assert not [each for each in row["exceeded"] if "ledger" in each or "booked" in each]
        assert sum(row["ours"].values()) == pytest.approx(100, abs=0.01)
        assert sum(row["truth"].values()) == pytest.approx(100, abs=0.01)


ASIDE: dict[str, Any] = {
    "fetches": [[10 * k * MS, 10 * k * MS] for k in range(6)],
    "copies": [[10 * k * MS, (10 * k + 1) * MS, "16"] for k in range(6)],
    "optimizer_steps": [[(10 * k + 8) * MS, (10 * k + 9) * MS] for k in range(6)],
}
"""Six steps of 10 ms, each with a copy on a stream of its own: what the device does is to be added."""


def copied_aside(kernel_begins_ms: float) -> dict[str, Any]:
    """Return a trace whose copies take 3 ms, beginning with the step. The kernels end with the step."""
    begin_ns = int(kernel_begins_ms * MS)
    ops = []
    for at in range(0, 60 * MS, 10 * MS):
        ops.append([at, at, at + 3 * MS, "16", "transfer"])
        ops.append([at, at + begin_ns, at + 10 * MS, "7", "compute"])
    return a_trace(**ASIDE, ops=ops)


@pytest.mark.parametrize(("kernel_begins_ms", "transfer_ms"), [(3, 18), (4, 18), (0, 0), (1, 0)])
def test_a_copy_on_another_stream_counts_where_the_step_waited_for_it(
    kernel_begins_ms: float, transfer_ms: float
) -> None:
    truth = true_times(parse(copied_aside(kernel_begins_ms), "x"))
    assert truth.states_ns["transfer"] == transfer_ms * MS
    assert truth.states_ns["compute"] == (60 - transfer_ms) * MS


@pytest.mark.parametrize(("kernel_begins_ms", "missed_points"), [(0, 0), (3, 30)])
def test_of_a_copy_inside_the_step_a_recording_does_not_say_whether_the_step_waits(
    kernel_begins_ms: float, missed_points: float
) -> None:
    """A copy on another stream begins with the step: the wait for it is no recorded event, and stays in compute."""
    row = compare(parse(copied_aside(kernel_begins_ms), "x"))
    assert row["difference"]["transfer"] == pytest.approx(-missed_points)
    assert row["difference"]["compute"] == pytest.approx(missed_points)
    assert row["input_wait_error_ms"] == 0


def test_an_event_is_reached_when_what_was_launched_before_is_done() -> None:
    ops = [*of_kernels((0, 1, 5), (2, 5, 6), (-1, -1, 0)), *of_kernels((0, 0, 9), stream="16")]
    host = Host(0)
    events = ReplayEvents(parse(a_trace(ops=ops), "x"), host)
    at_once = events.record(None)
    assert events.ready(at_once)
    host.go_to(2 * MS)
    first = events.record(None)  # the kernel that is launched in this very moment comes after it
    host.go_to(3 * MS)
    second = events.record(None)
    assert [events.ready(each) for each in (at_once, first, second)] == [True, False, False]
    with pytest.raises(RuntimeError, match="must be completed"):
        events.elapsed_ns(at_once, second)
    assert (events.usable(), events.record_aside(), events.foreign) == (True, None, 0)
    events.current = "16"
    aside = events.record_aside()
    assert (events.usable(), events.foreign) == (False, 1)
    host.go_to(6 * MS)
    assert [events.ready(each) for each in (first, second, aside)] == [True, True, False]
    assert events.elapsed_ns(at_once, first) == 5 * MS
    assert events.elapsed_ns(first, second) == 1 * MS
    host.go_to(9 * MS)
    assert events.ready(aside)


TIMES = st.integers(-3, 25)


@given(
    fetches=st.lists(st.tuples(TIMES, st.integers(0, 6)), min_size=1, max_size=4),
    ops=st.lists(
        st.tuples(
            TIMES, st.integers(0, 3), st.integers(0, 5), st.sampled_from(["7", "9"]), st.sampled_from(["compute", "transfer"])
        ),
        max_size=8,
    ),
)  # fmt: skip
def test_the_truth_is_what_each_instant_says(
    fetches: list[tuple[int, int]], ops: list[tuple[int, int, int, str, str]]
) -> None:
    """The same definitions again, asked at each instant and not of spans."""
    # In units of 2 ns, so that the middle of each unit is no edge of a span and no launch is -1.
    made = [Op(2 * at, 2 * (at + late), 2 * (at + late + took), stream, kind) for at, late, took, stream, kind in ops]
    trace = parse(
        a_trace(fetches=[[2 * at, 2 * (at + took)] for at, took in fetches], copies=[], optimizer_steps=[], ops=[[*op] for op in made]),
        "x",
    )  # fmt: skip
    begin, end = trace.window
    asked = [*(at for at, _ in trace.fetches[1:]), trace.host_end_ns]
    counted = dict.fromkeys(STATES, 0)
    busy = 0
    for at in range(begin + 1, end, 2):
        running = [op for op in made if op.begin < at < op.end]
        pending = [op for op in made if op.launch < at < op.end]
        computes = any(op.kind == "compute" for op in running)
        in_fetch = any(first < at < last for first, last in trace.fetches)
        # In the order in which the home stream takes them, the first that is not done.
        home = sorted(op for op in made if op.stream == "7")
        next_up = any(
            op.kind == "transfer"
            and op.launch < at < op.end
            and (op.begin < at or all(other.end < at for other in home[:number]))
            for number, op in enumerate(home)
        )
        aside = any(
            op.stream == "9" and op.kind == "transfer" and not any(
                other.kind == "compute" and other.begin < op.end and other.end > at for other in made if other.end > other.begin
            )
            for op in running
        )  # fmt: skip
        waits = any(
            fed < at < ask and all(op.end < at for op in made if op.launch < ask)
            for (_, fed), ask in zip(trace.fetches, asked, strict=True)
        )
        busy += 2 * bool(running)
        if in_fetch and not pending:
            counted["input_wait"] += 2
        elif (next_up or (aside and not in_fetch)) and not computes:
            counted["transfer"] += 2
        else:
            counted["host_wait" if waits else "compute"] += 2
    truth = true_times(trace)
    assert truth.states_ns == counted
    assert truth.busy_ns == busy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fetches": []}, "fetches: empty"),
        ({"fetches": [[5, 3]]}, r"fetches\[0\]: ends at 3"),
        ({"copies": [[0, 1]]}, r"copies\[0\]: \[0, 1\] is not \[begin, end, stream\]"),
        ({"optimizer_steps": [[0, "x"]]}, r"optimizer_steps\[0\]: end is 'x'"),
        ({"ops": {}}, "ops: dict instead of a list"),
        ({"ops": [[0, 1, 2, "7", "magic"]]}, r"ops\[0\]: kind 'magic'"),
        ({"home_stream": None}, "home_stream: None"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        parse(a_trace(**changes), "x")


def test_the_program_replays_what_it_can_and_names_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, cut = tmp_path / "good.json", tmp_path / "bad.json.gz", tmp_path / "cut.json.gz"
    good.write_text(json.dumps(a_trace()))
    bad.write_text(json.dumps(a_trace(fetches=[[5, 3]])))
    cut.write_bytes((TRACES / "linear-2080ti.json.gz").read_bytes()[:5000])
    assert main([str(good), str(bad), str(cut), str(tmp_path / "none"), "--json"]) == 2
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["files"]] == ["made-up"]
    assert [shown["summary"][key] for key in ("files", "exceeded", "unread")] == [4, 0, 3]
    assert "fetches[0]: ends at 3" in shown["unread"][0]
    assert "cut.json.gz" in shown["unread"][1]
    assert main([str(good)]) == 0
    assert "made-up" in capsys.readouterr().out
    monkeypatch.setattr("benchmarks.recorded.replay.BOUND_POINTS", -1.0)
    assert main([str(good)]) == 1
    assert "EXCEEDED compute off by" in capsys.readouterr().out
