"""Whatever happens to a run's messages: no second is lost, none is counted twice, and no counter goes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch import wire
from gpuwatch_agent.runs import Run, RunRegistry, read_record
from tests.unit.agent.hooks import BOOT, MS, NOW_S, FakeHook, S, wall_s

KEY = ("run-a", 0)

# Each kind is as likely as any other, and what makes the others matter is there more than once.
_ONE_PROCESS = [
    st.tuples(st.just("work"), st.integers(1, 3000)),  # ms
    st.tuples(st.just("steps"), st.integers(1, 5)),
    *(st.just((kind,)) for kind in ("send", "send", "hello", "lose", "repeat", "late", "agent_restart")),
]
ONE_PROCESS = st.one_of(_ONE_PROCESS)
EVENTS = st.one_of(
    *_ONE_PROCESS,
    st.tuples(st.just("silence"), st.integers(1, 20_000)),  # ms
    st.tuples(st.sampled_from(["new_process", "new_process_after_bye"]), st.integers(0, 5_000)),  # ms between them
    st.just(("other_speaks",)),
)


@dataclass
class World:
    """A hook, what it says, and an agent whose process comes and goes."""

    boot_id: str = BOOT
    skew_ns: int = 0
    wall_jump_s: float = 0.0
    book: RunRegistry = field(default_factory=lambda: RunRegistry(BOOT))
    hooks: list[FakeHook] = field(default_factory=list)
    output: list[wire.Message] = field(default_factory=list)
    late: list[wire.Message] = field(default_factory=list)
    now_ns: int = 1000 * S
    taken: int = 0
    floor: dict[str, int] = field(default_factory=dict)
    lost_floor: int = 0

    def __post_init__(self) -> None:
        self._add_hook()

    def _add_hook(self) -> None:
        self.hooks.append(
            FakeHook(
                self.now_ns - self.skew_ns,
                sender=f"sender-{len(self.hooks)}",
                boot_id=self.boot_id,
                wall_offset_ns=int(NOW_S * S) + self.skew_ns,
            )
        )

    @property
    def hook(self) -> FakeHook:
        return self.hooks[-1]

    @property
    def run(self) -> Run | None:
        return self.book.runs.get(KEY)

    def deliver(self, message: wire.Message) -> None:
        if self.book.apply(message, self.now_ns, wall_s(self.now_ns) + self.wall_jump_s):
            assert isinstance(message, wire.Steps)
            self.taken += wire.step_count(message.columns)

    def say(self, message: wire.Message) -> None:
        self.output.append(message)
        self.deliver(message)

    def take(self, event: tuple[str, int] | tuple[str]) -> None:
        kind, amount = event[0], event[1] if len(event) > 1 else 0
        if kind == "work":
            self.hook.spend("other", amount * MS)
        elif kind == "steps":
            for _ in range(amount):
                self.hook.step()
        elif kind == "hello":
            self.say(self.hook.hello())
        elif kind == "send":
            self.say(self.hook.message())
        elif kind == "lose":
            self.late.append(self.hook.message())
        elif kind == "repeat" and self.output:
            self.deliver(self.output[-1])
        elif kind == "late" and self.late:
            self.deliver(self.late.pop(0))
        elif kind == "other_speaks" and len(self.hooks) > 1:
            self.say(self.hooks[-2].message())
        elif kind == "silence":
            self.now_ns += amount * MS
            self.pass_time()
        elif kind == "agent_restart":
            self.restart()
        elif kind.startswith("new_process"):
            if kind.endswith("bye"):
                self.say(self.hook.bye())
            self.now_ns += amount * MS
            self._add_hook()
        self.now_ns = max(self.now_ns, self.hook.at_ns + self.skew_ns)
        self.pass_time()
        self.check()

    def pass_time(self) -> None:
        for run in self.book.runs.values():
            run.pass_time(self.now_ns, wall_s(self.now_ns) + self.wall_jump_s, True)
            run.remember(self.now_ns)

    def restart(self) -> None:
        records = [record for run in self.book.runs.values() if (record := run.record()) is not None]
        kept = [read_record(record) for record in records]
        self.book = RunRegistry(BOOT)
        self.book.restore(kept, self.now_ns, wall_s(self.now_ns) + self.wall_jump_s)

    def check(self) -> None:
        run = self.run
        if run is None or run.ledger is None:
            return
        ledger = run.ledger
        assert ledger.sum_ns == ledger.watermark_ns - ledger.start_ns
        counters = {**ledger.totals_ns, "steps": run.counts.steps, "samples": max(0, run.counts.samples)}
        counters["lost"] = run.lost
        went_back = {
            name: (self.floor[name], value) for name, value in counters.items() if value < self.floor.get(name, 0)
        }
        assert not went_back
        self.floor = counters
        covered_ns, recent, *_ = run.recent()
        assert covered_ns == sum(recent.values()) <= ledger.sum_ns


def play(world: World, events: list[tuple[str, int] | tuple[str]]) -> World:
    for event in events:
        world.take(event)
    return world


@given(
    st.lists(EVENTS, min_size=10, max_size=60), st.sampled_from([0, 7 * S, -500 * S]), st.sampled_from([0.0, -3600.0])
)
@settings(max_examples=100, deadline=None)
def test_sum_is_time_and_no_counter_goes_back(events, skew_ns: int, jump_s: float) -> None:
    """For the agent's own clock, for other clocks, and for a wall clock that is not the sender's."""
    world = World(boot_id=BOOT if skew_ns == 0 else "boot-b", skew_ns=skew_ns, wall_jump_s=jump_s)
    play(world, events)


@given(st.lists(EVENTS, min_size=10, max_size=60))
@settings(max_examples=100, deadline=None)
def test_good_byes_bring_every_count_to_the_hooks_own(events) -> None:
    """Once each process has closed its run, its steps are counted once, and each record is received or counted lost."""
    world = play(World(), events)
    for hook in world.hooks:
        world.deliver(hook.message())
        world.deliver(hook.bye())
    run = world.run
    assert run is not None and run.ledger is not None
    steps = sum(hook.steps for hook in world.hooks)
    assert run.counts.steps == steps
    assert run.counts.samples == (8 * steps if steps else -1)
    assert run.counts.phases_ns["data_wait"] == 60 * MS * steps
    assert world.taken + run.lost == steps


@given(st.lists(ONE_PROCESS, min_size=10, max_size=60), st.sampled_from([0, 7 * S]))
@settings(max_examples=100, deadline=None)
def test_without_unknown_time_the_ledger_is_the_hooks_to_the_nanosecond(events, skew_ns: int) -> None:
    world = World(boot_id=BOOT if skew_ns == 0 else "boot-b", skew_ns=skew_ns)
    for event in events:  # messages are lost, but some message comes at least every ten seconds
        if world.run is not None and world.now_ns - world.run.heard_ns > 6 * S:
            world.take(("send",))
        world.take(event)
    world.take(("send",))
    run = world.run
    assert run is not None and run.ledger is not None
    assert run.ledger.totals_ns == world.hook.ledger.totals_ns
    assert run.ledger.totals_ns["unknown"] == 0


def test_two_processes_that_share_a_name_are_each_counted_once() -> None:
    """GPUWATCH_RUN set for a whole shell: both send for the same run and rank, turn by turn."""
    book = RunRegistry(BOOT)
    one, two = FakeHook(sender="one"), FakeHook(sender="two")
    for _ in range(50):
        for hook in (one, two):
            hook.step()
            book.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    run = book.runs[KEY]
    assert run.ledger is not None
    assert run.counts.steps == 100
    assert run.lost == 0
    assert run.ledger.sum_ns == 5 * S == run.ledger.watermark_ns - run.ledger.start_ns


def test_more_processes_than_are_remembered_still_add_up_when_they_come_one_after_another() -> None:
    book = RunRegistry(BOOT)
    at_ns = 100 * S
    for number in range(40):
        hook = FakeHook(at_ns, sender=f"sender-{number}").step()
        book.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
        book.apply(hook.bye(), hook.at_ns, wall_s(hook.at_ns))
        at_ns = hook.at_ns + S
    run = book.runs[KEY]
    assert run.ledger is not None
    assert run.counts.steps == 40
    assert run.ledger.sum_ns == 40 * 100 * MS
    assert len(run.senders) <= 16
