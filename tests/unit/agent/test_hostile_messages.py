"""Valid messages with impossible values: the sender's own run may suffer; the page, history and other runs go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gpuwatch import wire
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent.history import StepBatch, Tick
from gpuwatch_agent.runs import Run
from tests.servers import wait_for
from tests.unit.agent.hooks import MS, NOW_S, FakeHook, S
from tests.unit.agent.whole_agent import WholeAgent

BEGIN_NS = 1000 * S
ALICE, MALLORY = Peer(1000, 4711, "localhost:1000:1000:4711"), Peer(1001, 666, "localhost:1001:1001:666")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeAgent]:
    agent = WholeAgent(tmp_path, monkeypatch, BEGIN_NS)
    yield agent
    agent.close()


def second_of(hook: FakeHook, agent: WholeAgent) -> None:
    """A hook's second: ten steps of 100 ms in two messages, as a real one sends them."""
    for _ in range(2):
        for _ in range(5):
            hook.step()
        agent.clock.now_ns = hook.at_ns
        agent.hear(hook.hello(), hook.message(), peer=ALICE)


def honest(agent: WholeAgent, hook: FakeHook, seconds: int, disturb: Any = None) -> None:
    for second in range(seconds):
        second_of(hook, agent)
        if disturb is not None:
            disturb(second)
        agent.tick(hook.at_ns)


def check_honest(agent: WholeAgent, hook: FakeHook) -> None:
    assert agent.value('gpuwatch_steps_total{rank="0",run="honest"}') == hook.steps
    assert agent.page().get(('gpuwatch_step_records_lost_total{rank="0",run="honest"}',), 0) == 0
    for state in ("input_wait", "compute"):
        reported = agent.value(f'gpuwatch_run_seconds_total{{rank="0",run="honest",state="{state}"}}')
        assert reported == pytest.approx(hook.ledger.totals_ns[state] / 1e9)
    assert agent.sampler.snapshot is not None and agent.sampler.snapshot.monotonic_s == hook.at_ns / 1e9
    found = agent.history.reader.steps("honest", 0, 20)
    assert (found.steps, sum(found.samples)) == (hook.steps, hook.samples)


def columns(count: int = 3, **values: int) -> dict[str, bytes]:
    """Columns of steps that were just now, with one value changed in the last row."""
    base = {
        "start_ns": BEGIN_NS,
        "data_wait_ns": MS,
        "transfer_ns": 0,
        "compute_ns": MS,
        "samples": 8,
        "epoch_start": 0,
    }
    base |= dict.fromkeys((*wire.DEVICE_COLUMNS, "comm_wait_ns"), 0)
    return {name: wire.pack([value] * (count - 1) + [values.get(name, value)]) for name, value in base.items()}


EXTREMES = (1 << 62, (1 << 63) - 1, -2, -(1 << 63), 1 << 53)


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("name", wire.STEP_COLUMNS)
def test_a_column_with_a_value_that_cannot_be_is_refused(agent: WholeAgent, name: str, value: int) -> None:
    bad = FakeHook(BEGIN_NS, run="bad", sender="bad", pid=666).step().message()
    agent.clock.now_ns = BEGIN_NS + S
    agent.hear(msgspec.structs.replace(bad, columns=columns(**{name: value})), peer=MALLORY)
    assert dict(agent.receiver.rejected) == {"impossible": 1}


def test_values_that_can_be_are_taken(agent: WholeAgent) -> None:
    good = FakeHook(BEGIN_NS, run="good").step().message()
    agent.clock.now_ns = BEGIN_NS + S
    hour = 3_600 * S // 4
    for values in (
        {"data_wait_ns": hour},
        {"input_wait_ns": -1},
        {"comm_wait_ns": -1, "samples": -1},
        {"compute_ns": hour},
    ):
        agent.hear(msgspec.structs.replace(good, columns=columns(**values)), peer=ALICE)
    assert (agent.receiver.received, dict(agent.receiver.rejected)) == (4, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": columns(input_wait_ns=1 << 62, device_compute_ns=1 << 62, host_wait_ns=1 << 62)},
        {"first_step": 1 << 62},
        {"first_step": (1 << 52) - 1},
        {"columns": columns(data_wait_ns=(1 << 40) - 1, samples=(1 << 40) - 1)},
        {"rank": 1 << 31},
        {"fetch_cpu_ratio": 1e308},
    ],
    ids=["device_columns", "first_step_2^62", "first_step_2^52", "large_columns", "rank", "ratio"],
)
def test_extreme_values_of_one_run_stop_nothing(agent: WholeAgent, changes: dict[str, Any]) -> None:
    hook, bad = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad", pid=666)

    def disturb(second: int) -> None:
        bad.step().spend("compute", 900 * MS)
        agent.hear(bad.hello(), peer=MALLORY)
        agent.hear(msgspec.structs.replace(bad.message(), **changes), peer=MALLORY)

    honest(agent, hook, 130, disturb)
    check_honest(agent, hook)
    assert agent.history.failures == 0
    agent.ask("bad")


def test_a_run_that_cannot_be_processed_is_dropped_counted_and_logged_once(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook, bad = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad", pid=666)
    remember, record, apply = Run.remember, Run.record, Run.apply

    def fail_at(step: str, real: Any) -> Any:
        def work(run: Run, *arguments: Any) -> Any:
            if run.run == "bad" and failing == step:
                raise OverflowError("int too big")
            return real(run, *arguments)

        return work

    monkeypatch.setattr(Run, "remember", fail_at("book", remember))
    monkeypatch.setattr(Run, "record", fail_at("serve", record))
    monkeypatch.setattr(Run, "apply", fail_at("apply", apply))
    for failing in ("apply", "book", "serve"):
        honest(agent, hook, 3, lambda second: agent.hear(bad.spend("compute", S).message(), peer=MALLORY))
        agent.sampler._runs._banned.clear()
        assert agent.failures()[failing] == 1
        check_honest(agent, hook)
    failing = ""
    honest(agent, hook, 3, lambda second: agent.hear(bad.spend("compute", S).message(), peer=MALLORY))
    assert agent.value('gpuwatch_run_failures_total{reason="serve"}') == 1
    assert agent.value('gpuwatch_run_up{rank="0",run="bad"}') == 1
    assert len([record for record in caplog.records if "is dropped for 60 s" in record.message]) == 3
    check_honest(agent, hook)


def test_an_error_before_a_run_is_known_costs_no_other_message(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = agent.sampler._runs._is_peer
    monkeypatch.setattr(
        agent.sampler._runs, "_is_peer", lambda hello, pid: 1 / 0 if pid == 666 else checked(hello, pid)
    )
    hook, bad = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad")
    honest(agent, hook, 3, lambda second: agent.hear(bad.hello(), peer=MALLORY))
    check_honest(agent, hook)
    assert agent.failures() == {"apply": 3}


def test_a_message_from_the_future_books_nothing(agent: WholeAgent) -> None:
    """Two messages booked 146 years, as the second one's clock was far ahead of its arrival.

    A message of more than nine years is refused as impossible.
    """
    hook, year_ns = FakeHook(BEGIN_NS, run="honest"), 365 * 86400 * S
    for boot_id in ("boot-a", "another machine"):
        bad = FakeHook(BEGIN_NS, run=f"bad {boot_id}", sender=boot_id, boot_id=boot_id, pid=666)
        agent.hear(bad.step().message(), peer=MALLORY)
        agent.hear(bad.spend("compute", 8 * year_ns).message(), peer=MALLORY)
    honest(agent, hook, 3)
    for boot_id in ("boot-a", "another machine"):
        run = agent.sampler._runs.runs[f"bad {boot_id}", 0]
        assert run.ledger is not None and run.ledger.sum_ns < 10 * S
        assert run.ledger.sum_ns == run.ledger.watermark_ns - run.ledger.start_ns
    assert agent.receiver.rejected["impossible"] == 2
    check_honest(agent, hook)


def test_an_agent_that_is_stopped_within_a_tick_does_not_take_that_for_silence(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = FakeHook(BEGIN_NS, run="r")
    honest(agent, hook, 3)

    def stopped() -> None:
        agent.clock.now_ns += 120 * S

    with monkeypatch.context() as patch:
        patch.setattr(agent.sampler._table, "begin_tick", stopped)
        agent.tick(hook.at_ns + S)
    hook.spend("compute", 121 * S)
    agent.hear(hook.message(), peer=ALICE)
    agent.tick(hook.at_ns)
    [run] = agent.sampler._runs.runs.values()
    assert run.ledger is not None and run.ledger.totals_ns["unknown"] == 0
    assert run.ledger.totals_ns["compute"] >= 121 * S


def test_clocks_that_are_read_one_after_the_other_move_no_watermark(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step back by a microsecond would be a counter that began again. A clock that is set is followed."""
    hook, offsets = FakeHook(BEGIN_NS, run="r"), list[float]()
    hook.spend("compute", S)
    agent.hear(hook.hello(), hook.message())
    real = agent.clock.time
    for second, late_s in enumerate((0.0, -2e-6, 3e-6, -4e-3, -30.0)):
        monkeypatch.setattr(agent.clock, "time", lambda late_s=late_s: real() + late_s)
        agent.tick(BEGIN_NS + 2 * S + second * S)
        [run] = agent.sampler._runs.runs.values()
        on_page_s = agent.value('gpuwatch_ledger_watermark_timestamp_seconds{rank="0",run="r"}')
        offsets.append(on_page_s - run.ledger.watermark_ns / 1e9)  # type: ignore[union-attr]
    assert offsets[:4] == [offsets[0]] * 4
    assert offsets[4] == pytest.approx(offsets[0] - 30, abs=0.01)


def test_a_run_of_centuries_is_refused(agent: WholeAgent) -> None:
    bad = FakeHook(S, run="old", sender="old", boot_id="another machine").spend("compute", 500 * 86400 * S)
    agent.hear(bad.message(), peer=MALLORY)
    agent.tick(BEGIN_NS + S)
    assert ("old", 0) not in agent.sampler._runs.runs and agent.receiver.rejected["impossible"] == 1


def test_a_row_that_cannot_be_summed_stops_neither_downsampling_nor_retention(agent: WholeAgent) -> None:
    """As an earlier agent took it: sums beyond 64 bits, columns of other lengths, rubbish."""
    history = agent.history
    rows = [
        columns(4, data_wait_ns=(1 << 63) - 1, compute_ns=(1 << 63) - 1, transfer_ns=(1 << 63) - 1),
        columns(4, data_wait_ns=(1 << 63) - 1),
    ]
    rows.append({**columns(4), "samples": b"12345"})
    for number, packed in enumerate(rows):
        assert history.commit(Tick(NOW_S + number, [], {}, [], [StepBatch("bad", 0, 0, NOW_S + number, 0, packed)], []))
    history._connection.execute(
        "INSERT INTO steps SELECT id + 10, run, rank, 9, 1, time_ms, 0, x'c1' FROM steps WHERE id = 1"
    )
    good = FakeHook(5 * S, run="good").step()
    history.commit(Tick(NOW_S + 5, [], {}, [], [StepBatch("good", 0, 0, NOW_S + 5, 0, good.message().columns)], []))
    for _ in range(5):
        history.downsample(NOW_S + 300)
    assert (history.failures, history.bad_rows) == (0, 3)
    left = history._connection.execute("SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM step_minute)")
    assert left.fetchone() == (0, 2)
    assert history.reader.steps("good", 0, 5).steps == 1
    assert history.reader.steps("bad", 0, 5).steps == 4
    history.trim(NOW_S + 8 * 86400)
    assert history._connection.execute("SELECT count(*) FROM step_minute").fetchone() == (0,)


def test_one_failing_job_of_the_history_leaves_the_others(agent: WholeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OverflowError("int too big")

    monkeypatch.setattr("gpuwatch_agent.history.downsample_steps", fail)
    monkeypatch.setattr("gpuwatch_agent.history.downsample_ticks", fail)
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 3)
    wait_for("two jobs a second", lambda: agent.history.failures == 6, 10)
    agent.history.trim(NOW_S + 8 * 86400)
    assert agent.history._connection.execute("SELECT count(*) FROM tick").fetchone() == (0,)
    assert agent.history.commit(Tick(NOW_S + 1100, [], {}, [], [], []))


WAIT_S = "gpuwatch_agent.history.writer._WAIT_S"
"""Short only while a test's disk hangs: a writer that gets no core for so long hangs as well."""


def until_written(agent: WholeAgent, hook: FakeHook) -> None:
    def look() -> bool:
        honest(agent, hook, 1)
        return not agent.sampler.writer.waiting

    wait_for("what waited is written", look, 20)


WAITING = "gpuwatch_history_waiting_seconds"


def test_a_disk_that_hangs_holds_up_no_page_and_costs_no_record(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook, answers, write = FakeHook(BEGIN_NS, run="honest"), threading.Event(), agent.history._write
    honest(agent, hook, 2)
    assert agent.value(WAITING) == 0
    monkeypatch.setattr(WAIT_S, 0.3)
    monkeypatch.setattr(agent.history, "_write", lambda tick: answers.wait(60) and write(tick))
    thread, waited = agent.sampler.writer._thread, []
    offer = thread.offer

    def offered(work: Callable[[], bool], wait_s: float) -> bool | None:
        waited.append((second, wait_s))
        return offer(work, wait_s)

    monkeypatch.setattr(thread, "offer", offered)
    for second in range(1, 31):
        honest(agent, hook, 1)
        assert agent.value('gpuwatch_steps_total{rank="0",run="honest"}') == hook.steps
        assert agent.value(WAITING) == second
    assert {second for second, wait_s in waited if wait_s} == {1}, "only the first second waited"
    assert {second for second, _ in waited} == {*range(1, 31)}
    monkeypatch.setattr(WAIT_S, 60.0)
    answers.set()
    until_written(agent, hook)
    check_honest(agent, hook)
    assert agent.value(WAITING) == 0 and agent.value("gpuwatch_history_failures_total") == 0
    served = agent.history.reader.series("gpuwatch_steps_total", {}, NOW_S + 990, agent.clock.time(), 100)
    assert len(served[0].points) == hook.steps / 10
    logged = [record.getMessage() for record in caplog.records if "its disk" in record.getMessage()]
    assert [text.split("its disk ")[1] for text in logged] == [
        "has not responded for 0.3 s; up to 16 MiB are buffered",
        "responds again",
    ]


def test_what_waits_for_a_disk_is_bounded_and_counted(agent: WholeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, answers, write = FakeHook(BEGIN_NS, run="honest"), threading.Event(), agent.history._write
    monkeypatch.setattr(WAIT_S, 0.3)
    monkeypatch.setattr("gpuwatch_agent.history.writer._MOST_WAITING_BYTES", 100_000)
    monkeypatch.setattr(agent.history, "_write", lambda tick: answers.wait(60) and write(tick))
    honest(agent, hook, 40)
    waiting, skipped = agent.value(WAITING), agent.value("gpuwatch_history_failures_total")
    assert 2 < waiting < 20 and waiting + skipped == 40
    monkeypatch.setattr(WAIT_S, 60.0)
    answers.set()
    until_written(agent, hook)
    assert agent.value('gpuwatch_steps_total{rank="0",run="honest"}') == hook.steps
    found, skipped = agent.history.reader.steps("honest", 0, 20), agent.value("gpuwatch_history_failures_total")
    assert found.steps == hook.steps - 10 * skipped, "all but those of the seconds that were skipped"


def test_a_backup_that_locks_the_file_delays_no_page_and_costs_no_record(
    agent: WholeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 2)
    monkeypatch.setattr(WAIT_S, 0.3)
    with contextlib.closing(sqlite3.connect(agent.history.path, isolation_level=None)) as shell:
        shell.execute("BEGIN EXCLUSIVE")
        honest(agent, hook, 5)
        assert agent.value(WAITING) == 5
        monkeypatch.setattr(WAIT_S, 60.0)
        shell.execute("ROLLBACK")
    until_written(agent, hook)
    check_honest(agent, hook)


def test_an_error_in_the_writer_costs_no_page(agent: WholeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 1)
    with monkeypatch.context() as patch:
        patch.setattr(agent.history, "_write", lambda tick: {}[0])
        honest(agent, hook, 3)
        assert agent.value('gpuwatch_steps_total{rank="0",run="honest"}') == hook.steps
    assert agent.failures() == {"history": 3}
    honest(agent, hook, 1)
    assert agent.history.reader.steps("honest", 0, 20).steps == hook.steps - 30


# Who sends -----------------------------------------------------------------------------------------------------------


def test_a_run_is_of_its_first_user(agent: WholeAgent) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")

    def disturb(second: int) -> None:
        forged = FakeHook(hook.at_ns - 900 * MS, run="honest", sender="forged", pid=666).spend("stalled", 900 * MS)
        stolen = FakeHook(hook.at_ns, run="honest", sender="sender-a", pid=666)
        other_rank = FakeHook(hook.at_ns, run="honest", rank=1, sender="rank 1", pid=666)
        agent.hear(forged.hello(), forged.message(), stolen.bye(), other_rank.hello(), peer=MALLORY)

    honest(agent, hook, 5, disturb)
    check_honest(agent, hook)
    assert agent.page().get(('gpuwatch_run_seconds_total{rank="0",run="honest",state="stalled"}',), 0) == 0
    assert agent.receiver.rejected == {"wrong_user": 20}


def test_another_process_of_the_same_user_cannot_speak_for_it(agent: WholeAgent) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")

    def disturb(second: int) -> None:
        agent.hear(FakeHook(hook.at_ns, run="honest", sender="sender-a").bye(), peer=ALICE._replace(pid=12))

    honest(agent, hook, 5, disturb)
    check_honest(agent, hook)
    assert agent.receiver.rejected == {"wrong_process": 5}


def test_the_binding_survives_a_restart_of_the_agent(
    agent: WholeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = FakeHook(BEGIN_NS, run="honest")
    honest(agent, hook, 2)
    agent.close()
    again = WholeAgent(tmp_path, monkeypatch, hook.at_ns)
    again.hear(FakeHook(hook.at_ns, run="honest", sender="sender-a", pid=666).bye(), peer=MALLORY)
    honest(again, hook, 2)
    assert again.receiver.rejected == {"wrong_user": 1}
    check_honest(again, hook)
    again.close()


# How much ------------------------------------------------------------------------------------------------------------


def test_a_process_beyond_its_quota_costs_no_other_one_a_record(agent: WholeAgent) -> None:
    hook, hello = FakeHook(BEGIN_NS, run="honest"), wire.encode(FakeHook(BEGIN_NS, run="bad", pid=666).hello())
    honest(agent, hook, 4, lambda second: agent.hear(*[hello] * 5000, peer=MALLORY))
    check_honest(agent, hook)
    assert agent.receiver.rejected["rate"] == pytest.approx(4 * 5000 - 2000 - 3 * 500, abs=600)


def test_large_frames_are_bounded_by_their_bytes(agent: WholeAgent) -> None:
    bad = FakeHook(BEGIN_NS, run="bad", pid=666).step().message()
    frame = wire.encode(msgspec.structs.replace(bad, columns=columns(wire.MAX_STEPS_A_MESSAGE)))
    agent.hear(*[frame] * 500, peer=MALLORY)
    assert 16 << 20 >= agent.receiver.received * len(frame) > 15 << 20
    agent.tick(BEGIN_NS + S)
    run = agent.sampler._runs.runs["bad", 0]
    kept = [stretch.columns for stretch in run.trace._stretches if stretch.columns]
    assert sum(len(column) for found in kept for column in found.values()) <= 128 << 10


def test_forged_runs_give_way_to_an_honest_one(agent: WholeAgent) -> None:
    for number in range(600):
        agent.hear(
            FakeHook(BEGIN_NS, run=f"forged-{number}", sender=str(number), pid=666).step().message(), peer=MALLORY
        )
    agent.tick(BEGIN_NS + S)
    assert len(agent.sampler._runs.runs) == 512
    hook = FakeHook(agent.clock.now_ns, run="honest")
    honest(agent, hook, 3)
    check_honest(agent, hook)
    assert agent.value('gpuwatch_run_failures_total{reason="given_up"}') == 1
    assert agent.value('gpuwatch_messages_rejected_total{reason="too_many_runs"}') == 88


def test_short_runs_leave_few_series_and_little_on_disk(agent: WholeAgent) -> None:
    number = 0
    hook = FakeHook(BEGIN_NS, run="honest")

    def five_runs(second: int) -> None:
        nonlocal number
        for _ in range(5):
            number += 1
            short = FakeHook(hook.at_ns - 200 * MS, run=f"short-{number}", sender=str(number), pid=10_000 + number)
            peer = Peer(1002, short.pid, str(short.pid))
            agent.hear(short.hello(), short.step().message(), short.bye(), peer=peer)

    honest(agent, hook, 60, five_runs)
    check_honest(agent, hook)
    assert len(agent.page()) < 64 * 45 + 300
    layouts = agent.history._connection.execute("SELECT sum(length(series)) FROM layout").fetchone()[0]
    assert layouts < 2_000_000


# A fuzz test of the whole --------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(0, 3), st.sampled_from([1 << bits for bits in (31, 40, 47, 51, 57, 61)]), st.integers(0, 1 << 62)
)
signed = st.one_of(numbers, st.integers(-(1 << 63), (1 << 63) - 1), st.just(-1))
messages = st.tuples(
    st.sampled_from(["steps", "steps", "steps", "hello", "bye"]),
    st.integers(0, 2),  # the run, of which the last is the honest one's
    st.integers(-2 * S, 4 * S),  # how far its clock goes
    st.dictionaries(
        st.sampled_from(["first_step", "steps", "samples", "tokens", "overhead_ns", "hidden_ns", "device_steps", "ready_batches",
                         "rank", "batches", "monotonic_ns", "time_ns", "start_ns", "states", "pid", "world_size", "num_workers"]),
        numbers, max_size=3),
    st.dictionaries(st.sampled_from(wire.STEP_COLUMNS), signed, max_size=3),
    st.one_of(st.none(), st.tuples(st.integers(0, 4000), st.integers(0, 255))),  # a byte changed
)  # fmt: skip


def fuzzed(hook: FakeHook, kind: str, changes: dict[str, int], columns_: dict[str, int]) -> wire.Message:
    """Return a hook's message with values replaced where they belong."""
    message: Any = {"steps": hook.message, "hello": hook.hello, "bye": hook.bye}[kind]()
    replace = msgspec.structs.replace
    message = replace(message, **{n: v for n, v in changes.items() if n in message.__struct_fields__})
    message = replace(
        message,
        origin=replace(message.origin, **{n: v for n, v in changes.items() if n in message.origin.__struct_fields__}),
    )
    if isinstance(message, wire.Hello):
        return replace(
            message, loader=wire.Loader(num_workers=changes.get("num_workers"), batches=changes.get("batches"))
        )
    totals = replace(message.totals, **{n: v for n, v in changes.items() if n in message.totals.__struct_fields__})
    if "states" in changes:
        totals = replace(
            totals, states_ns={"compute": changes["states"]}, watermark_ns=totals.start_ns + changes["states"]
        )
    message = replace(message, totals=totals)
    if isinstance(message, wire.Steps) and columns_:
        base = {name: list(wire.unpack(column)) for name, column in message.columns.items()} or {
            "start_ns": [hook.at_ns]
        }
        for name, value in columns_.items():
            column = base.setdefault(name, [0] * len(base["start_ns"]))
            column[-1] = value
        message = replace(message, columns={name: wire.pack(column) for name, column in base.items()})
    return message  # type: ignore[no-any-return]


def play(script: list[list[Any]], directory: Path) -> set[str]:
    """Send a script, a list for each second, beside an honest run; check what must hold, and return what it met."""
    with pytest.MonkeyPatch.context() as patch:
        agent = WholeAgent(directory, patch, BEGIN_NS)
        try:
            hook = FakeHook(BEGIN_NS, run="honest")
            bad = [FakeHook(BEGIN_NS, run=run, sender=f"bad {n}", boot_id=boot, pid=666)
                   for n, (run, boot) in enumerate([("bad", "boot-a"), ("bad", "boot-b"), ("honest", "boot-a")])]  # fmt: skip

            def disturb(second: int) -> None:
                for kind, who, ns, changes, columns_, flip in script[second]:
                    bad[who].step().spend("compute", max(0, ns))
                    bad[who].at_ns += min(0, ns)
                    try:
                        frame = wire.encode(fuzzed(bad[who], kind, changes, columns_))
                    except OverflowError:
                        continue  # it cannot be sent
                    if flip is not None:
                        at = flip[0] % len(frame)
                        frame = frame[:at] + bytes([flip[1]]) + frame[at + 1 :]
                    agent.hear(frame, peer=MALLORY)

            honest(agent, hook, len(script), disturb)
            check_honest(agent, hook)
            for seconds in (30, 90, 200):  # nothing more is sent: silence, downsampling, retention
                second_of(hook.spend("compute", seconds * S), agent)
                agent.tick(hook.at_ns)
            check_honest(agent, hook)
            assert agent.history.failures == 0
            assert agent.failures() == {}, "refused by its values, not dropped after an error"
            met = set(agent.receiver.rejected) | ({"kept apart"} if agent.sampler._runs.kept_apart else set())
            for run in agent.sampler._runs.runs.values():
                if run.ledger is not None:
                    assert run.ledger.sum_ns == run.ledger.watermark_ns - run.ledger.start_ns
                    assert run.ledger.watermark_ns <= hook.at_ns + S
                    met |= {f"{run.run} {run.status}", f"{run.run} lost {bool(run.lost)}"}
                agent.ask(run.run)
            return met
        finally:
            agent.close()


CORPUS = Path(__file__).parents[2] / "fixtures/fuzz"
FUZZ_S = float(os.environ.get("FUZZ_SECONDS", "5"))
"""Of processor time, in seconds. To add scripts that meet something new to the corpus, run by hand:

FUZZ_SECONDS=600 FUZZ_KEEP=1 pytest tests/unit/agent/test_hostile_messages.py -k whatever
"""


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_harmless(path: Path, tmp_path: Path) -> None:
    play(json.loads(path.read_text()), tmp_path)


def test_whatever_is_sent_the_page_the_history_and_an_honest_run_go_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Run random scripts for `FUZZ_S` of processor time; one that fails is made as short as possible and kept."""
    met: set[frozenset[str]] = set()
    number, scripts, end_s = 0, 0, time.thread_time() + FUZZ_S

    def look(script: list[list[Any]]) -> None:
        nonlocal scripts
        scripts += 1
        try:
            found = frozenset(play(script, tmp_path_factory.mktemp("fuzz")))
        except BaseException:
            (CORPUS / "failed.json").write_text(json.dumps(script))
            raise
        if found not in met and os.environ.get("FUZZ_KEEP"):
            (CORPUS / f"{len(met):03}.json").write_text(json.dumps(script) + "\n")
        met.add(found)

    while not number or time.thread_time() < end_s:
        number += 1
        strategy = st.lists(st.lists(messages, max_size=6), min_size=2, max_size=8)
        quiet = settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(quiet(given(script=strategy)(look)))()
    print(f"{scripts} scripts in {FUZZ_S:.0f} s of processor time, {len(met)} different outcomes")


def test_bit_flips_of_good_frames_stop_nothing(agent: WholeAgent) -> None:
    hook, bad, chance = FakeHook(BEGIN_NS, run="honest"), FakeHook(BEGIN_NS, run="bad", sender="bad"), random.Random(7)

    def disturb(second: int) -> None:
        for _ in range(5):
            bad.step().spend("compute", 100 * MS)
            for message in (bad.hello(), bad.message()):
                frame = bytearray(wire.encode(message))
                for _ in range(chance.randrange(1, 4)):
                    frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
                agent.hear(bytes(frame), peer=MALLORY)

    honest(agent, hook, 60, disturb)
    check_honest(agent, hook)
    assert agent.failures() == {}
