"""When a run is running, ended or lost, and what its silence is booked as."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.finding import Conclusion, Evidence, Finding, Verdict
from gpuwatch.errors import ProtocolError
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent.history import queries
from gpuwatch_agent.runs import Run, RunRegistry, read_record
from gpuwatch_agent.runs.views import run_view
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s
from tests.unit.agent.whole_agent import WholeAgent


def heard(*messages: wire.Message, at_ns: int) -> Run:
    run = Run("run-a", 0, BOOT)
    for message in messages:
        run.apply(message, at_ns, wall_s(at_ns))
    return run


def restarted(run: Run, now_ns: int, boot_id: str = BOOT) -> Run:
    record = run.record()
    assert record is not None
    record = read_record(record)
    return record.restore(boot_id, now_ns, wall_s(now_ns))


def test_killed_process_is_lost_after_two_seconds_and_its_tail_unknown() -> None:
    hook = FakeHook().step()
    run = heard(hook.hello(), hook.message(), at_ns=hook.at_ns)
    run.pass_time(hook.at_ns + 2 * S, wall_s(0), alive=False)
    assert run.status == "running"
    run.pass_time(hook.at_ns + 2500 * MS, wall_s(0), alive=False)
    assert run.status == "lost" and run.ledger is not None
    assert run.ledger.totals_ns["unknown"] == 2500 * MS
    assert run.ledger.sum_ns == 2600 * MS


def test_step_records_that_a_killed_process_never_sent_are_counted_once() -> None:
    hook = FakeHook().step().step()
    reported = msgspec.structs.replace(hook.message(), columns={})  # its totals name two steps whose records never came
    run = heard(hook.hello(), reported, at_ns=hook.at_ns)
    assert run.lost == 0
    for seconds in (3, 4):
        run.pass_time(hook.at_ns + seconds * S, 0.0, alive=False)
    assert run.lost == 2


def test_stopped_process_is_unknown_while_silent_and_right_afterwards() -> None:
    hook = FakeHook().step()
    run = heard(hook.message(), at_ns=hook.at_ns)
    last = hook.at_ns
    for seconds in range(1, 16):
        run.pass_time(last + seconds * S, 0.0, alive=True)
    assert run.ledger is not None and run.status == "running"
    assert run.ledger.totals_ns["unknown"] == 15 * S
    hook.spend("compute", 15 * S + 500 * MS)  # the step in which it was stopped ends
    run.apply(hook.message(), hook.at_ns, 0.0)
    hook.spend("input_wait", 2 * S)
    run.apply(hook.message(), hook.at_ns, 0.0)
    assert run.ledger.totals_ns["unknown"] == 15 * S
    assert run.ledger.totals_ns["compute"] == 540 * MS
    assert run.ledger.totals_ns["input_wait"] == 2 * S + 60 * MS
    assert run.ledger.sum_ns == run.ledger.watermark_ns - run.ledger.start_ns == 17_600 * MS


def test_lost_run_that_speaks_again_is_running_and_is_kept_by_the_next_agent() -> None:
    hook = FakeHook().step()
    run = heard(hook.hello(), hook.message(), at_ns=hook.at_ns)
    run.pass_time(hook.at_ns + 61 * S, wall_s(hook.at_ns + 61 * S), alive=None)
    assert run.status == "lost"
    hook.spend("compute", 2000 * S)
    run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    assert (run.status, run.ended_s) == ("running", None)
    record = run.record()
    assert record is not None
    book = RunRegistry(BOOT)
    book.restore([read_record(record)], hook.at_ns, wall_s(hook.at_ns) + 5000)
    assert list(book.runs) == [("run-a", 0)]


@pytest.mark.parametrize("late", ["hello", "tell"])
def test_message_after_the_good_bye_does_not_bring_a_run_back(late: str) -> None:
    hook = FakeHook().step()
    straggler = hook.hello() if late == "hello" else hook.message()
    run = heard(hook.hello(), hook.message(), hook.bye(), straggler, at_ns=hook.at_ns)
    assert run.status == "ended"


def test_hello_before_totals_makes_no_series_and_does_not_stay_for_ever() -> None:
    hook = FakeHook()
    run = heard(hook.hello(), at_ns=hook.at_ns)
    assert run.record() is None
    run.pass_time(hook.at_ns + 3 * S, wall_s(hook.at_ns), alive=False)
    assert run.status == "lost" and run.ended_s is not None


def test_totals_before_hello_are_booked_and_the_name_comes_later() -> None:
    hook = FakeHook().step()
    run = heard(hook.message(), hook.hello(name="bert"), at_ns=hook.at_ns)
    assert run.ledger is not None and run.ledger.sum_ns == 100 * MS
    assert run.hello is not None and run.hello.name == "bert"


def test_agent_that_was_held_up_does_not_book_its_own_absence_as_silence() -> None:
    hook = FakeHook().step()
    book = RunRegistry(BOOT)
    now = hook.at_ns
    book.apply(hook.message(), now, 0.0)
    book.excuse_pause(now)
    now += 40 * S  # the agent is stopped; messages wait in the socket and are read a moment later
    book.excuse_pause(now)
    run = book.runs["run-a", 0]
    run.pass_time(now, 0.0, alive=False)
    assert run.status == "running" and run.ledger is not None
    assert run.ledger.totals_ns["unknown"] == 0
    hook.spend("compute", 40 * S)
    book.apply(hook.message(), now + S, 0.0)
    book.apply(hook.bye(), now + S, 0.0)
    assert run.status == "ended"
    assert run.ledger.totals_ns == hook.ledger.totals_ns


@pytest.mark.parametrize("pause_s", [1.5, 2.5, 3.6, 40.0])
def test_a_pause_of_the_agent_between_a_message_and_its_tick_is_not_silence(pause_s: float) -> None:
    hook = FakeHook().step()
    book = RunRegistry(BOOT)
    book.apply(hook.message(), hook.at_ns, 0.0)
    book.excuse_pause(hook.at_ns)
    received = hook.step().at_ns  # and the agent is stopped before it is taken
    now = received + int(pause_s * S)
    book.excuse_pause(now)
    book.apply(hook.message(), received, 0.0)
    run = book.runs["run-a", 0]
    run.pass_time(now, 0.0, alive=False)
    assert run.status == "running"
    book.excuse_pause(now + 3 * S)
    run.pass_time(now + 3 * S, 0.0, alive=False)
    assert run.status == "lost", "the agent was there, and nothing came"


def test_real_silence_is_found_although_turns_go_on() -> None:
    hook = FakeHook().step()
    book = RunRegistry(BOOT)
    book.apply(hook.message(), hook.at_ns, 0.0)
    for seconds in range(12):
        book.excuse_pause(hook.at_ns + seconds * S)
        book.runs["run-a", 0].pass_time(hook.at_ns + seconds * S, 0.0, alive=True)
    ledger = book.runs["run-a", 0].ledger
    assert ledger is not None and ledger.totals_ns["unknown"] == 11 * S


def test_elastic_restart_with_good_bye_leaves_the_time_between_out() -> None:
    first = FakeHook(sender="one").step()
    run = heard(first.message(), first.bye(), at_ns=first.at_ns)
    second = FakeHook(first.at_ns + 30 * S, sender="two").step()
    for message in (second.hello(), second.message()):
        run.apply(message, second.at_ns, wall_s(second.at_ns))
    assert run.status == "running" and run.ledger is not None
    assert run.ledger.sum_ns == 200 * MS
    assert run.ledger.totals_ns["unknown"] == 0
    assert run.counts.steps == 2


def test_elastic_restart_without_good_bye_has_unknown_time_between() -> None:
    first = FakeHook(sender="one").step()
    run = heard(first.message(), at_ns=first.at_ns)
    second = FakeHook(first.at_ns + 30 * S, sender="two").step()
    run.apply(second.message(), second.at_ns, wall_s(second.at_ns))
    assert run.ledger is not None
    assert run.ledger.totals_ns["unknown"] == 30 * S
    assert run.ledger.sum_ns == 30 * S + 200 * MS


def test_run_of_a_former_boot_is_lost_and_its_id_can_go_on() -> None:
    """A requeued Slurm job keeps its id over a reboot, after which the monotonic clock is younger than the run was."""
    hook = FakeHook(at_ns=900_000 * S).step()
    run = heard(hook.hello(), hook.message(), at_ns=hook.at_ns)
    now_ns = 120 * S  # two minutes into the next boot
    run.last_message_s = wall_s(now_ns) - 300
    run = restarted(run, now_ns, boot_id="boot-b")
    assert run.status == "lost" and run.ledger is not None
    assert run.ledger.watermark_ns == pytest.approx(now_ns - 300 * S, abs=MS)
    again = FakeHook(at_ns=now_ns, sender="again", boot_id="boot-b").step()
    run.apply(again.message(), again.at_ns, wall_s(again.at_ns))
    assert run.ledger.totals_ns["compute"] == 80 * MS
    assert run.ledger.totals_ns["unknown"] == pytest.approx(300 * S, abs=MS)
    assert run.ledger.sum_ns == run.ledger.watermark_ns - run.ledger.start_ns


def test_first_message_that_waited_for_the_agent_is_placed_by_the_wall_clocks() -> None:
    """Another boot id (a virtual machine's clock): the hook kept its messages for a minute before an agent came."""
    hook = FakeHook(at_ns=5 * S, boot_id="boot-vm", wall_offset_ns=int(wall_s(1000 * S) * S))
    hook.step()
    early = hook.message()
    run = Run("run-a", 0, BOOT)
    now_ns = 1000 * S + hook.at_ns + 45 * S  # 45 s after it was sent
    run.apply(early, now_ns, wall_s(now_ns))
    assert run.ledger is not None
    assert run.ledger.watermark_ns == pytest.approx(now_ns - 45 * S, abs=MS)


def test_last_minute_of_a_long_run_forgets_what_was_before() -> None:
    hook = FakeHook()
    run = Run("run-a", 0, BOOT)
    for second in range(300):
        hook.spend("startup" if second < 200 else "compute", S)
        run.apply(hook.message(), hook.at_ns, 0.0)
        run.remember(hook.at_ns)
    assert run.recent()[:2] == (60 * S, {"compute": 60 * S})


def test_last_minute_of_an_ended_run_stays_as_it_was() -> None:
    hook = FakeHook()
    run = Run("run-a", 0, BOOT)
    for _ in range(100):
        hook.spend("compute", S)
        run.apply(hook.message(), hook.at_ns, 0.0)
        run.remember(hook.at_ns)
    run.apply(hook.bye(), hook.at_ns, 0.0)
    for second in range(600):
        run.remember(hook.at_ns + second * S)
    assert run.recent()[:2] == (60 * S, {"compute": 60 * S})


def test_totals_that_shrink_are_not_believed() -> None:
    hook = FakeHook().step().step()
    run = heard(hook.message(), at_ns=hook.at_ns)
    hook.spend("compute", S)
    lie = msgspec.structs.replace(hook.message(), totals=msgspec.structs.replace(hook.totals(), steps=0))
    run.apply(lie, hook.at_ns, 0.0)
    assert run.counts.steps == 2
    hook.spend("compute", S)
    run.apply(hook.message(), hook.at_ns, 0.0)
    assert run.ledger is not None and run.ledger.totals_ns == hook.ledger.totals_ns


def test_ten_thousand_names_are_refused() -> None:
    book = RunRegistry(BOOT)
    refused = []
    for number in range(10_000):
        hook = FakeHook(run=f"run-{number}")
        try:
            book.apply(hook.message(), hook.at_ns, 0.0)
        except ProtocolError as error:
            refused.append(error.reason)
    assert len(book.runs) == 512
    assert refused == ["too_many_runs"] * (10_000 - 512)


def test_refused_run_has_no_step_records_to_keep() -> None:
    book = RunRegistry(BOOT)
    book.MAX_RUNS = 1
    assert book.apply(FakeHook().step().message(), 200 * S, 0.0) is book.runs["run-a", 0]
    with pytest.raises(ProtocolError):
        book.apply(FakeHook(run="run-b").step().message(), 200 * S, 0.0)
    assert list(book.runs) == [("run-a", 0)]


def test_ended_run_makes_room_for_a_new_one() -> None:
    book = RunRegistry(BOOT)
    book.MAX_RUNS = 2
    for name in ("first", "second"):
        hook = FakeHook(run=name)
        book.apply(hook.message(), hook.at_ns, 0.0)
    hook = FakeHook(run="second")
    book.apply(hook.bye(), hook.at_ns, 0.0)
    book.apply(FakeHook(run="third").message(), hook.at_ns, 0.0)
    assert {run for run, _ in book.runs} == {"first", "third"}


def test_ended_run_is_forgotten_after_a_quarter_of_an_hour() -> None:
    hook = FakeHook()
    book = RunRegistry(BOOT)
    book.apply(hook.bye(), hook.at_ns, 1000.0)
    book.forget_ended(1899.0)
    assert len(book.runs) == 1
    book.forget_ended(1901.0)
    assert not book.runs


# A restart of the agent, and two live processes of one run -----------------------------------------------------------


@pytest.mark.parametrize("alive", [False, None])
def test_a_run_that_ended_while_the_agent_was_away_is_not_billed_for_the_absence(alive: bool | None) -> None:
    hook = FakeHook().step().spend("compute", 12 * S)
    run = heard(hook.hello(), hook.message(), at_ns=hook.at_ns)
    again = restarted(run, hook.at_ns + 50 * S)
    for second in range(0, 100, 5):
        again.pass_time(hook.at_ns + (50 + second) * S, wall_s(hook.at_ns) + 50 + second, alive=alive)
    assert again.status == "lost" and again.ended_s == again.last_message_s
    assert again.ledger is not None and again.ledger.totals_ns["unknown"] == 0
    assert again.ledger.sum_ns == again.ledger.watermark_ns - again.ledger.start_ns == hook.ledger.sum_ns


@pytest.mark.parametrize("boot", [BOOT, "boot-b"])
def test_a_run_that_was_lost_long_before_the_agent_s_start_is_told_for_a_quarter_of_an_hour(boot: str) -> None:
    """Alerts need `gpuwatch_run_up` 0, or the lost run in the snapshot, for a minute."""
    hook = FakeHook().step()
    record = heard(hook.hello(), hook.message(), at_ns=hook.at_ns).record()
    assert record is not None
    now_ns = hook.at_ns + 1200 * S
    book = RunRegistry(boot)
    book.restore([read_record(record)], now_ns, wall_s(now_ns))
    for second in range(1, 120):
        at_ns = now_ns + second * S
        book.excuse_pause(at_ns)
        book.forget_ended(wall_s(at_ns))
        for run in book.runs.values():
            run.pass_time(at_ns, wall_s(at_ns), alive=False)
    assert [(run.status, run.ended_s) for run in book.runs.values()] == [("lost", wall_s(hook.at_ns))]
    book.forget_ended(wall_s(now_ns + 1000 * S))
    assert book.runs, "its end is not written yet"
    for run in book.runs.values():
        run.changed = False
    book.forget_ended(wall_s(now_ns + 1000 * S))
    assert not book.runs


def test_a_run_s_kept_totals_are_not_taken_for_heard_ones_with_its_hello() -> None:
    """After a kill with a full disk they are older than what was served: for a tick between the two counters fell."""
    hook = FakeHook().step()
    record = heard(hook.hello(), hook.message(), at_ns=hook.at_ns).record()
    assert record is not None
    book = RunRegistry(BOOT)
    book.restore([read_record(record)], hook.at_ns, wall_s(hook.at_ns))
    (run,) = book.runs.values()
    book.apply(hook.hello(), hook.at_ns, wall_s(hook.at_ns))
    assert run.restored
    book.apply(hook.step().message(), hook.at_ns, wall_s(hook.at_ns))
    assert not run.restored


@pytest.mark.parametrize("down_s", [300, 1200])
def test_a_run_that_a_reboot_ended_is_lost_in_the_history_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down_s: int
) -> None:
    hook = FakeHook().step()
    agent = WholeAgent(tmp_path, monkeypatch, hook.at_ns)
    agent.hear(hook.hello(), hook.message())
    agent.tick(hook.at_ns)
    agent.close()
    monkeypatch.setattr("tests.unit.agent.whole_agent.BOOT", "boot-b")
    now_ns = hook.at_ns + down_s * S
    again = WholeAgent(tmp_path, monkeypatch, now_ns)
    for second in range(3):
        again.tick(now_ns + second * S)
    (run,) = queries.runs(again.history.reader, [], {"kept": "all"}, Prices()).runs
    again.close()
    assert run.status == "lost"


def test_a_live_run_that_is_silent_after_the_restart_is_unknown() -> None:
    hook = FakeHook().step()
    run = heard(hook.hello(), hook.message(), at_ns=hook.at_ns)
    again = restarted(run, hook.at_ns + 50 * S)
    again.pass_time(hook.at_ns + 70 * S, 0.0, alive=True)
    assert again.ledger is not None and again.ledger.totals_ns["unknown"] == 70 * S
    assert again.activity == "silent"


@pytest.mark.parametrize(("alive", "is_up"), [(True, True), (None, False), (False, False)])
def test_a_live_run_is_up_before_its_first_message_to_a_restarted_agent(alive: bool | None, is_up: bool) -> None:
    """A scrape that saw it down would end its alerts, which fire again minutes later."""
    hook = FakeHook().step()
    again = restarted(heard(hook.hello(), hook.message(), at_ns=hook.at_ns), hook.at_ns + 50 * S)
    again.pass_time(hook.at_ns + 51 * S, 0.0, alive=alive)
    assert (again.status, again.activity != "silent") == ("running", is_up)


def test_two_live_processes_with_one_run_and_rank_are_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    book = RunRegistry(BOOT, alive=lambda hello: True)
    one, two = FakeHook(sender="one", pid=1), FakeHook(sender="two", pid=2)
    names = {}
    for _ in range(10):
        for hook, state in ((one, "compute"), (two, "input_wait")):
            hook.step(0, 500 * MS) if state == "compute" else hook.step(500 * MS, 0)
            assert book.apply(hook.hello(), hook.at_ns, 0.0) is None
            run = book.apply(hook.message(), hook.at_ns, 0.0)
            names[hook.sender] = run and run.run
    assert {key: run.ledger.totals_ns["compute"] for key, run in book.runs.items() if run.ledger is not None} == {
        ("run-a", 0): 5 * S,
        ("run-a#2", 0): 0,
    }
    assert [run.counts.steps for run in book.runs.values()] == [10, 10]
    assert names == {"one": "run-a", "two": "run-a#2"}
    assert book.kept_apart == 1
    assert len([record for record in caplog.records if "two processes" in record.message]) == 1


@pytest.mark.parametrize("first_ends", [False, True])
def test_what_is_kept_apart_stays_so_over_a_restart_of_the_agent(first_ends: bool) -> None:
    """Its totals are those since its start: under a third name, or the first one's, they would count twice."""
    book = RunRegistry(BOOT, alive=lambda hello: True)
    one, two = FakeHook(sender="one", pid=1), FakeHook(sender="two", pid=2)
    for hook in (one, two):
        hook.step(0, 500 * MS)
        for message in (hook.hello(), hook.message()):
            book.apply(message, hook.at_ns, wall_s(hook.at_ns))
    if first_ends:
        book.apply(one.bye(), one.at_ns, wall_s(one.at_ns))
    kept = [read_record(record) for run in book.runs.values() if (record := run.record()) is not None]
    again = RunRegistry(BOOT, alive=lambda hello: True)
    again.restore(kept, two.at_ns, wall_s(two.at_ns))
    two.step(0, 500 * MS)
    for message in (two.message(), two.hello()):
        again.apply(message, two.at_ns, wall_s(two.at_ns))
    assert {run.run: run.counts.steps for run in again.runs.values()} == {"run-a": 1, "run-a#2": 2}
    assert again.kept_apart == 0


def test_two_processes_of_an_address_that_send_at_once_over_tcp_are_kept_apart() -> None:
    """No process is visible over TCP: one that sent in the last two seconds is alive, an older one has a successor."""
    book = RunRegistry(BOOT, alive=lambda hello: None)
    peer = Peer(address="10.0.0.7")
    one, two = FakeHook(sender="one", pid=1), FakeHook(sender="two", pid=2)
    for _ in range(5):
        for hook in (one, two):
            hook.step(0, 500 * MS)
            for message in (hook.hello(), hook.message()):
                book.apply(message, hook.at_ns, 0.0, peer)
    assert {run.run: run.counts.steps for run in book.runs.values()} == {"run-a": 5, "run-a#2": 5}
    restarted = FakeHook(one.at_ns + 3 * S, sender="three", pid=3).step()
    for message in (restarted.hello(), restarted.message()):
        book.apply(message, restarted.at_ns, 0.0, peer)
    assert {run.run: run.counts.steps for run in book.runs.values()} == {"run-a": 6, "run-a#2": 5}


def test_over_tcp_a_process_that_began_while_the_agent_was_away_takes_over_its_dead_predecessor_s_run() -> None:
    """That the agent has just started is no sign of life of the former process."""
    peer = Peer(address="10.0.0.7")
    book = RunRegistry(BOOT)
    one = FakeHook(sender="one", pid=1).step()
    for message in (one.hello(), one.message()):
        book.apply(message, one.at_ns, wall_s(one.at_ns), peer)
    kept = [read_record(record) for run in book.runs.values() if (record := run.record()) is not None]
    now_ns = one.at_ns + 30 * S
    again = RunRegistry(BOOT)
    again.restore(kept, now_ns, wall_s(now_ns))
    two = FakeHook(now_ns, sender="two", pid=2).step()
    for message in (two.hello(), two.message()):
        again.apply(message, two.at_ns, wall_s(two.at_ns), peer)
    assert {run.run: run.counts.steps for run in again.runs.values()} == {"run-a": 2}
    assert again.kept_apart == 0


def test_a_process_that_follows_a_dead_one_takes_over() -> None:
    alive = True
    book = RunRegistry(BOOT, alive=lambda hello: alive)
    one = FakeHook(sender="one", pid=1).step()
    book.apply(one.hello(), one.at_ns, 0.0)
    book.apply(one.message(), one.at_ns, 0.0)
    alive = False
    two = FakeHook(one.at_ns + S, sender="two", pid=2).step()
    book.apply(two.hello(), two.at_ns, 0.0)
    book.apply(two.message(), two.at_ns, 0.0)
    assert list(book.runs) == [("run-a", 0)] and book.kept_apart == 0


def test_a_processs_next_loop_takes_over() -> None:
    book = RunRegistry(BOOT, alive=lambda hello: True)
    for number in range(3):
        hook = FakeHook((100 + number) * S, sender=f"loop {number}").step()
        book.apply(hook.hello(), hook.at_ns, 0.0)
        book.apply(hook.message(), hook.at_ns, 0.0)
    assert list(book.runs) == [("run-a", 0)] and book.kept_apart == 0


def test_of_many_ended_runs_the_latest_stay() -> None:
    book = RunRegistry(BOOT)
    for number in range(100):
        hook = FakeHook(run=f"run-{number}")
        book.apply(hook.bye(), hook.at_ns, float(number))
    book.forget_ended(100.0)
    assert [run for run, _ in book.runs] == [f"run-{number}" for number in range(36, 100)]


VERDICT = Verdict("input", 0.6, "input-bound: 60% of the time training waited for data")


def cause(name: str, value: float = 0.6) -> Finding:
    return Finding(name, "critical", "title", 0.6, (Evidence("wait", value, "ratio", "60%"),), "num_workers 4 → 10")


def ended(hook: FakeHook, conclusion: bytes) -> Run:
    bye = msgspec.structs.replace(hook.bye(), conclusion=conclusion)
    return heard(hook.hello(), hook.message(), bye, at_ns=hook.at_ns)


def test_what_a_process_concludes_at_its_end_is_kept_and_shown() -> None:
    found = Conclusion(VERDICT, (cause("input_cpu"), cause("a_cause_of_a_newer_version")))
    run = ended(FakeHook().step(), wire.encode(found))
    for each in (run, restarted(run, 200 * S)):
        view = run_view(each, Prices())
        assert view.conclusion is not None and view.verdict == view.conclusion.verdict == VERDICT
        assert [one.cause for one in view.conclusion.findings] == ["input_cpu"]


@pytest.mark.parametrize(
    "conclusion",
    [b"", b"\xc1", b"\x91" * 30_000, wire.encode({"verdict": 1}), wire.encode(Conclusion(VERDICT, (cause("input_cpu", float("nan")),)))],
    ids=["none", "no msgpack", "nested", "another shape", "nan"],
)  # fmt: skip
def test_a_conclusion_that_cannot_be_read_leaves_the_end_as_it_is(conclusion: bytes) -> None:
    run = ended(FakeHook().step(), conclusion)
    assert run.status == "ended" and run.conclusion is None and run_view(run, Prices()).verdict is None


def test_a_conclusion_of_one_of_several_processes_is_not_the_run_s() -> None:
    run = ended(FakeHook().step(), wire.encode(Conclusion(VERDICT)))
    later = FakeHook(200 * S, sender="sender-b").step()
    run.apply(later.message(), later.at_ns, wall_s(later.at_ns))
    assert run.status == "running" and run.conclusion is None
    bye = msgspec.structs.replace(later.bye(), conclusion=wire.encode(Conclusion(VERDICT)))
    run.apply(bye, later.at_ns, wall_s(later.at_ns))
    assert run.status == "ended" and run.conclusion is None


def test_a_conclusion_that_is_too_long_is_refused_with_its_message() -> None:
    bye = msgspec.structs.replace(FakeHook().step().bye(), conclusion=b"x" * (wire.MAX_CONCLUSION_BYTES + 1))
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(bye))
