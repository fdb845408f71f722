"""A GPU's wall clock, second by second, from what the driver and the hooks say."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch_agent.gpus import GpuLedgers, GpuReading, GpuRecord
from gpuwatch_agent.processes.owners import Owner
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s

UUID = "GPU-1"


class Node:
    """One GPU and a clock of whole seconds."""

    def __init__(self) -> None:
        self.book = GpuLedgers()
        self.now_ns = 1000 * S
        self.runs: dict[int, Run] = {}
        self.allocated: tuple[Owner, ...] | None = None

    def second(self, pids: tuple[int, ...] | None = (), busy: float | None = 0.0, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_ns += S
            self.tick(pids, busy)

    def tick(self, pids: tuple[int, ...] | None, busy: float | None) -> None:
        reading = GpuReading("0", UUID, pids, busy, allocated=self.allocated)
        self.book.advance([reading], self.runs, self.now_ns)
        self.check()

    def lost(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += S
            self.book.advance([], self.runs, self.now_ns)
            self.check()

    def check(self) -> None:
        for account in self.book.accounts.values():
            assert account.ledger.sum_ns == account.ledger.watermark_ns - account.ledger.start_ns

    def hear(self, hook: FakeHook, activity: str = "step") -> None:
        run = self.runs.setdefault(hook.pid, Run(hook.run, hook.rank, BOOT))
        run.apply(hook.message(activity), self.now_ns, wall_s(self.now_ns))

    def restart_agent(self) -> None:
        records = [account.record(BOOT) for account in self.book.accounts.values()]
        kept = [msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=GpuRecord) for record in records]
        self.book = GpuLedgers()
        self.book.restore(kept, BOOT, self.now_ns)

    @property
    def seconds(self) -> dict[str, float]:
        return {s: ns / 1e9 for s, ns in self.book.accounts[UUID].ledger.totals_ns.items() if ns}


def train(
    node: Node, hook: FakeHook, seconds: int, state: str = "compute", busy: float = 0.9, activity: str = "step"
) -> None:
    for _ in range(seconds):
        hook.spend(state, S)
        node.now_ns = hook.at_ns
        node.hear(hook, activity)
        node.tick((hook.pid,), busy)


def test_free_gpu_is_unallocated_once_no_process_can_have_been_missed() -> None:
    node = Node()
    node.tick((), 0.0)
    node.second(seconds=30)
    assert node.seconds == {"unallocated": 19.0}
    assert node.book.accounts[UUID].state == "unallocated"


def test_gpu_without_a_process_is_free_or_allocated_where_that_is_known() -> None:
    node = Node()
    node.tick((), 0.0)
    node.second(seconds=5)
    node.allocated = ()
    node.second(seconds=5)
    node.allocated = (Owner("alice", "4711"),)
    node.second(seconds=20)
    assert node.seconds == {"unallocated": 5.0, "free": 5.0, "allocated_unused": 9.0}
    assert node.book.accounts[UUID].state == "allocated_unused"
    node.restart_agent()
    node.second(seconds=2)
    assert node.seconds == {"unallocated": 5.0, "free": 5.0, "allocated_unused": 20.0}
    hook = FakeHook(pid=50, at_ns=node.now_ns)
    train(node, hook, 4)
    assert node.seconds["allocated_unused"] == 22.0 and node.seconds["compute"] == 4.0


def test_run_that_held_the_gpu_takes_its_open_time_back_from_the_allocation() -> None:
    node = Node()
    node.allocated = (Owner("alice", "4711"),)
    node.tick((), 0.0)
    node.second(seconds=4)
    hook = FakeHook(pid=50, at_ns=node.now_ns)
    node.allocated = ()
    node.second(seconds=4)  # the job is over by its file; the process that holds the GPU is not listed yet
    hook.spend("compute", 4 * S)
    node.hear(hook)
    node.tick((50,), 0.9)
    assert node.seconds == {"allocated_unused": 4.0, "compute": 4.0}


def test_held_gpu_is_idle_or_busy_by_its_utilisation() -> None:
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=5)
    node.second((9,), 0.6, seconds=3)
    node.second((9,), None, seconds=2)
    assert node.seconds == {"held_idle": 5.0, "busy_unattributed": 3.0, "unknown": 2.0}


def test_idle_since_is_reported_while_it_lasts() -> None:
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=5)
    assert node.book.accounts[UUID].idle_since_ns == 1000 * S
    node.second((9,), 0.5)
    assert node.book.accounts[UUID].idle_since_ns is None


def test_a_gpu_is_idle_for_no_time_in_which_the_agent_was_stopped() -> None:
    """Its ledger has that time as `unknown`."""
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=5)
    node.now_ns += 1200 * S
    node.tick((9,), 0.0)
    account = node.book.accounts[UUID]
    assert (node.seconds["unknown"], account.idle_since_ns) == (1200.0, node.now_ns)


def test_process_that_the_list_named_late_is_booked_from_its_own_start() -> None:
    """The driver is asked for processes every 10 s: what the hook knows of the time before is not lost to "free"."""
    node = Node()
    node.tick((), 0.0)
    node.second((), 0.0, seconds=20)
    hook = FakeHook(node.now_ns)
    for second in range(8):  # it trains, and the list is from before
        hook.spend("startup" if second < 3 else "compute", S)
        node.now_ns = hook.at_ns
        node.hear(hook)
        node.tick((), 0.0 if second < 3 else 0.9)
    train(node, hook, 2)
    assert node.seconds == {"unallocated": 20.0, "startup": 3.0, "compute": 7.0}


def test_run_to_its_last_nanosecond_and_then_no_run() -> None:
    node = Node()
    node.tick((), 0.0)
    node.second((), 0.0, seconds=20)
    hook = FakeHook(node.now_ns)
    train(node, hook, 5)
    hook.spend("checkpoint", 700 * MS)
    node.runs[hook.pid].apply(hook.bye(), node.now_ns + S, 0.0)
    node.second((), 0.0, seconds=20)
    assert node.seconds["compute"] == 5.0
    assert node.seconds["checkpoint"] == 0.7
    assert node.seconds["unallocated"] == 28.3  # 20 s before, and all but the 0.7 s and the last 11 s after


def test_process_without_a_hook_after_one_with_it() -> None:
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=3)
    hook = FakeHook(node.now_ns)
    train(node, hook, 4)
    node.runs[hook.pid].apply(hook.bye(), node.now_ns, 0.0)
    node.second((9,), 0.0, seconds=3)
    assert node.seconds == {"held_idle": 6.0, "compute": 4.0}


def test_busy_gpu_whose_process_is_never_listed_belongs_to_no_run() -> None:
    """A container without `pid: host`: the driver lists nothing, and says that something runs."""
    node = Node()
    node.tick((), 0.0)
    node.second((), 0.0, seconds=5)
    node.second((), 0.8, seconds=20)
    assert node.seconds == {"unallocated": 5.0, "busy_unattributed": 9.0}
    node.second((), 0.0, seconds=20)
    assert node.seconds == {"unallocated": 5.0 + 8.0, "busy_unattributed": 21.0}  # busy until it is seen not to be


def test_two_runs_on_one_gpu_have_one_owner_called_shared() -> None:
    node = Node()
    one, two = FakeHook(node.now_ns, pid=1), FakeHook(node.now_ns, run="run-b", sender="b", pid=2)
    node.tick((1, 2), 0.9)
    for _ in range(5):
        for hook in (one, two):
            hook.spend("compute", S)
            node.now_ns = hook.at_ns
            node.hear(hook)
        node.tick((1, 2), 0.9)
    assert node.book.accounts[UUID].owner == "shared"
    assert node.seconds == {"compute": 5.0}  # by both at once, and counted once
    node.runs[2].apply(two.bye(), node.now_ns, 0.0)
    train(node, one, 3, "eval")
    assert node.book.accounts[UUID].owner == "run-a"
    assert node.seconds == {"compute": 5.0, "eval": 3.0}


def test_one_run_on_two_gpus_gives_both_its_states() -> None:
    node, hook = Node(), FakeHook(1000 * S)
    for state in ("compute", "compute", "input_wait", "checkpoint"):
        hook.spend(state, S)
        node.now_ns = hook.at_ns
        node.hear(hook)
        node.book.advance(
            [GpuReading("0", UUID, (hook.pid,), 0.9), GpuReading("1", "GPU-2", (hook.pid,), 0.8)],
            node.runs,
            node.now_ns,
        )
        node.check()
    for account in node.book.accounts.values():
        assert {s: ns / 1e9 for s, ns in account.ledger.totals_ns.items() if ns} == {
            "compute": 1.0,  # the accounts begin with the first look
            "input_wait": 1.0,
            "checkpoint": 1.0,
        }
        assert account.owner == "run-a"


def test_time_in_which_nothing_was_sampled_is_unknown_without_a_hook() -> None:
    """A stopped agent, a paused machine: 50 s later it is not known what the GPU did."""
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=3)
    node.now_ns += 50 * S
    node.tick((9,), 0.0)
    node.second((9,), 0.0, seconds=2)
    assert node.seconds == {"held_idle": 5.0, "unknown": 50.0}


def test_free_gpu_after_a_pause_is_free_up_to_it() -> None:
    node = Node()
    node.tick((), 0.0)
    node.second((), 0.0, seconds=15)
    node.now_ns += 50 * S
    node.tick((), 0.0)
    assert node.seconds == {"unallocated": 15.0, "unknown": 50.0}


def test_time_in_which_nothing_was_sampled_is_the_runs_where_one_holds_the_gpu() -> None:
    node, hook = Node(), FakeHook(1000 * S)
    train(node, hook, 5)
    train(node, hook.spend("eval", 50 * S), 1)
    assert node.seconds == {"compute": 5.0, "eval": 50.0}


def test_compute_on_a_gpu_without_a_kernel_is_doubted_after_ten_seconds() -> None:
    node, hook = Node(), FakeHook(1000 * S)
    train(node, hook, 5)
    train(node, hook, 25, busy=0.0)
    assert node.seconds == {"compute": 4.0 + 10.0, "unknown": 15.0}
    train(node, hook, 5, busy=0.4)
    train(node, hook, 5, "input_wait", busy=0.0)  # waiting for input, it may well be idle
    assert node.seconds == {"compute": 19.0, "unknown": 15.0, "input_wait": 5.0}


def test_utilisation_that_is_not_reported_contradicts_nothing() -> None:
    node, hook = Node(), FakeHook(1000 * S)
    for _ in range(30):
        hook.spend("compute", S)
        node.now_ns = hook.at_ns
        node.hear(hook)
        node.tick((hook.pid,), None)
    assert node.seconds == {"compute": 29.0}


def test_set_wall_clock_leaves_every_second_where_it_was() -> None:
    """Wall time jumps by eight hours and back: ledgers live on the monotonic clock, which does neither."""
    node, hook = Node(), FakeHook(1000 * S)
    for second in range(12):
        hook.spend("compute", S)
        hook.wall_offset_ns += {4: 8 * 3600 * S, 8: -9 * 3600 * S}.get(second, 0)
        node.now_ns = hook.at_ns
        run = node.runs.setdefault(hook.pid, Run(hook.run, hook.rank, BOOT))
        now_s = (hook.at_ns + hook.wall_offset_ns) / 1e9
        run.apply(hook.message(), node.now_ns, now_s)
        run.pass_time(node.now_ns, now_s, True)
        assert run.status == "running"
        node.tick((hook.pid,), 0.9)
    assert node.seconds == {"compute": 11.0}


def test_lost_gpu_is_unknown_and_its_run_goes_on_when_it_is_back() -> None:
    node = Node()
    hook = FakeHook(node.now_ns)
    train(node, hook, 5)
    hook.spend("other", 10 * S)
    node.lost(seconds=10)
    node.hear(hook)
    train(node, hook, 5)
    assert node.seconds == {"compute": 4.0 + 5.0, "unknown": 10.0}  # its first second began the account


def test_gpu_that_another_one_replaces_ends_and_one_that_is_missing_does_not() -> None:
    """The driver was reloaded, and gives GPU 1 another UUID: of two GPUs there are two."""
    node = Node()
    first, second, new = (GpuReading("01"[n > 0], f"GPU-{n}", (), 0.0) for n in range(3))
    for readings in ([first, second], [first], [first, new], [replace(new, gpu="0")], [replace(new, gpu="0")]):
        node.now_ns += S
        node.book.advance(readings, {}, node.now_ns)
        if readings == [first]:
            assert node.book.accounts.keys() == {"GPU-0", "GPU-1"}
        else:
            assert node.book.accounts.keys() == {"GPU-0", "GPU-1" if second in readings else "GPU-2"}
    node.now_ns += 20 * S
    node.restart_agent()
    node.book.advance([replace(new, gpu="0")], {}, node.now_ns)
    assert node.book.accounts.keys() == {"GPU-0", "GPU-2"}, "one of two is missing, as before"


def test_gpus_listed_lately_are_expected_by_the_next_agent() -> None:
    node = Node()
    first, second, instance = GpuReading("0", "GPU-0", (), 0.0), GpuReading("1", UUID, (), 0.0), "1:0"
    node.book.advance([first, second, GpuReading(instance, "MIG-0", (), 0.0, size_ratio=3 / 7)], {}, node.now_ns)
    for _ in range(100):
        node.now_ns += S
        node.book.advance([first], {}, node.now_ns)
    kept = [account.record(BOOT) for account in node.book.accounts.values()]
    assert len(kept) == 3
    assert [GpuLedgers().restore(kept, BOOT, node.now_ns + 10 * S, memory_s) for memory_s in (111, 109, 9)] == [2, 1, 0]
    again = GpuLedgers()
    again.restore(kept, BOOT, node.now_ns)
    after = [account.record(BOOT) for account in again.accounts.values()]
    assert GpuLedgers().restore(after, BOOT, node.now_ns, 99) == 1, "a restart does not list it"


def test_restarted_agent_leaves_its_absence_to_the_run() -> None:
    node = Node()
    hook = FakeHook(node.now_ns)
    train(node, hook, 5)
    hook.spend("eval", 30 * S)
    node.now_ns = hook.at_ns
    node.restart_agent()
    node.book.advance([], node.runs, node.now_ns)  # the driver has not answered yet
    train(node, hook, 2)
    assert node.seconds == {"compute": 4.0 + 2.0, "eval": 30.0}


def test_restarted_agent_that_finds_no_process_has_an_unknown_absence() -> None:
    node = Node()
    hook = FakeHook(node.now_ns)
    train(node, hook, 5)
    node.now_ns += 30 * S
    node.restart_agent()
    del node.runs[hook.pid]
    node.tick((), 0.0)
    node.second((), 0.0, seconds=12)
    assert node.seconds == {"compute": 4.0, "unknown": 30.0, "unallocated": 1.0}


def test_restarted_agent_without_a_driver_waits_ten_seconds_and_gives_up() -> None:
    node = Node()
    hook = FakeHook(node.now_ns)
    train(node, hook, 5)
    node.restart_agent()
    node.lost(seconds=9)
    assert node.seconds == {"compute": 4.0}
    node.lost(seconds=2)
    assert node.seconds == {"compute": 4.0, "unknown": 11.0}


def test_free_gpu_stays_free_up_to_the_restart() -> None:
    node = Node()
    node.tick((), 0.0)
    node.second((), 0.0, seconds=15)
    node.now_ns += 4 * S
    node.restart_agent()
    node.tick((), 0.0)
    assert node.seconds == {"unallocated": 15.0, "unknown": 4.0}


def test_ledger_of_another_boot_is_not_taken_up() -> None:
    node = Node()
    node.tick((9,), 0.0)
    node.second((9,), 0.0)
    book = GpuLedgers()
    book.restore([node.book.accounts[UUID].record("boot-z")], BOOT, node.now_ns)
    assert book.accounts == {}


SECOND = st.tuples(
    st.sampled_from(["free", "held", "hook", "both", "lost", "wedged", "restart", "bye"]),
    st.sampled_from([None, 0.0, 0.9]),
    st.sampled_from([None, (), (Owner("alice", "4711"),)]),
    st.integers(1, 12),
)


@given(st.lists(SECOND, max_size=30))
@settings(max_examples=200, deadline=None)
def test_sum_is_time_and_nothing_goes_back(seconds) -> None:
    node = Node()
    hooks = [FakeHook(node.now_ns, pid=1), FakeHook(node.now_ns, run="run-b", sender="b", pid=2)]
    floor: dict[str, int] = {}
    node.tick((), 0.0)
    for kind, busy, allocated, count in seconds:
        for _ in range(count):
            node.now_ns += S
            for hook in hooks:
                hook.spend("compute", node.now_ns - hook.at_ns)
                if kind in ("hook", "both"):
                    node.hear(hook)
            pids = {"free": (), "held": (9,), "hook": (1,), "both": (1, 2), "wedged": None}.get(kind, (1,))
            reading = GpuReading("0", UUID, pids, busy, allocated=allocated)
            node.book.advance([] if kind == "lost" else [reading], node.runs, node.now_ns)
            node.check()
            totals = dict(node.book.accounts[UUID].ledger.totals_ns)
            assert all(totals[state] >= ns for state, ns in floor.items())
            floor = totals
        if kind == "restart":
            node.restart_agent()
        if kind == "bye" and 1 in node.runs:
            node.runs[1].apply(hooks[0].bye(), node.now_ns, 0.0)
            hooks[0] = FakeHook(node.now_ns, pid=1, sender=f"again-{node.now_ns}")
    account = node.book.accounts[UUID]
    assert account.ledger.watermark_ns <= node.now_ns


def test_a_gpu_that_a_finished_training_holds_is_held_idle_until_something_runs_on_it() -> None:
    node, hook = Node(), FakeHook()
    node.hear(hook)
    train(node, hook, 10)
    train(node, hook, 20, "other", busy=0.0, activity="idle")
    before = node.seconds
    assert before["held_idle"] == 20.0, before
    assert node.book.accounts[UUID].idle_since_ns is not None
    train(node, hook, 5, "other", busy=0.5, activity="idle")
    assert node.seconds["other"] == 5.0, "work after training uses it"
    train(node, hook, 5, "other", busy=0.0, activity="between_steps")
    assert (node.seconds["other"], node.seconds["held_idle"]) == (10.0, 20.0)
