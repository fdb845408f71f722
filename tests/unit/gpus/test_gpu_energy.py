"""A GPU's energy by state: the driver's counter, second by second, joined with its ledger."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from gpuwatch.ledger.states import by_kind
from gpuwatch.metrics import BY_NAME, Sample
from gpuwatch_agent import exporter
from gpuwatch_agent.gpus import GpuReading
from gpuwatch_agent.gpus.energy import MOST_WATTS, EnergyAccount, MeteredLedger
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import read_record
from tests.unit.agent.hooks import MS, FakeHook, S, wall_s
from tests.unit.gpus.test_gpu_ledger import UUID, Node

TABLE = ProcessTable(Path("/nowhere"), Path("/nowhere"), Path("/nowhere"))
"""No process is visible."""


class Metered(Node):
    """A GPU with an energy counter, which begins at what it used before."""

    def __init__(self, counter: float | None = 5e6) -> None:
        super().__init__()
        self.counter = counter

    def use(self, watts: float, pids: tuple[int, ...] = (9,), busy: float | None = 0.0, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_ns += S
            if self.counter is not None:
                self.counter += watts
            self.tick(pids, busy)

    def tick(self, pids: tuple[int, ...] | None, busy: float | None) -> None:
        reading = GpuReading("0", UUID, pids, busy, energy_joules=self.counter)
        self.book.advance([reading], self.runs, self.now_ns)
        self.check()

    def train(self, hook: FakeHook, watts: dict[str, float]) -> None:
        """Pass a second in each of these states, with this power in it."""
        for state, power in watts.items():
            hook.spend(state, S)
            self.now_ns = hook.at_ns
            assert self.counter is not None
            self.counter += power
            self.hear(hook)
            self.tick((hook.pid,), 0.5)

    @property
    def energy(self) -> EnergyAccount:
        return self.book.accounts[UUID].ledger.energy

    @property
    def joules(self) -> dict[str, float]:
        return {state: round(each, 6) for state, each in self.energy.joules.items() if each}


def test_each_second_s_energy_is_that_of_its_state() -> None:
    node = Metered()
    node.tick((9,), 0.0)
    node.use(80, seconds=5)
    node.use(400, busy=0.9, seconds=3)
    assert node.joules == {"held_idle": 400, "busy_unattributed": 1200}
    assert by_kind(node.energy.joules) == {"working": 1200, "waiting": 0, "idle": 400, "unknown": 0}
    assert node.counter is not None and sum(node.joules.values()) == node.counter - 5e6


def test_a_run_has_the_energy_of_its_gpu_also_of_its_last_second() -> None:
    node = Metered()
    node.tick((), 0.0)
    node.use(90, (), seconds=5)  # booked late, when the run is there
    hook = FakeHook(at_ns=node.now_ns)
    for _ in range(5):
        node.train(hook, {"compute": 700, "input_wait": 120})
    run = node.runs[hook.pid]
    assert run.energy_joules == {"compute": 3500, "input_wait": 600}
    assert node.joules == {**run.energy_joules, "unallocated": 450}
    hook.spend("compute", S)
    node.now_ns += S
    assert node.counter is not None
    node.counter += 700
    run.apply(hook.bye(), node.now_ns, wall_s(node.now_ns))
    node.tick((), 0.0)
    node.use(90, (), seconds=30)
    assert run.energy_joules == {"compute": 4200, "input_wait": 600}
    assert node.joules == {"compute": 4200, "input_wait": 600, "unallocated": 24 * 90}
    record = run.record()
    assert record is not None and read_record(record).energy_joules == run.energy_joules


def test_a_long_step_s_wait_and_compute_each_have_their_own_seconds() -> None:
    """Ten seconds of waiting and ten of work arrive in one message: the counter's readings in between separate them."""
    node = Metered()
    hook = FakeHook(at_ns=node.now_ns)
    node.hear(hook.spend("compute", MS))
    node.now_ns = hook.at_ns
    node.tick((hook.pid,), 0.5)
    for watts in [100] * 10 + [600] * 10:
        node.use(watts, (hook.pid,), 0.5)
    hook.step(10 * S, 10 * S)
    node.hear(hook)
    node.tick((hook.pid,), 0.5)
    assert node.joules == {"input_wait": 1000, "compute": 6000}


def test_energy_and_ledger_survive_a_restart_of_the_agent() -> None:
    node = Metered()
    node.tick((9,), 0.0)
    node.use(100, seconds=3)
    assert node.counter is not None
    node.now_ns += 20 * S
    node.counter += 20 * 50
    node.restart_agent()
    node.tick((9,), 0.0)
    node.use(100, seconds=2)
    assert node.joules == {"held_idle": 500, "unknown": 1000}
    assert sum(node.joules.values()) == node.counter - 5e6


def test_a_reset_counter_goes_on_from_0_and_a_jump_is_left_out() -> None:
    node = Metered()
    node.tick((9,), 0.0)
    node.use(100, seconds=3)
    node.counter = 40.0  # the driver was loaded again within this second
    node.now_ns += S
    node.tick((9,), 0.0)
    assert node.joules == {"held_idle": 340}
    node.counter = 9e9
    node.now_ns += S
    node.tick((9,), 0.0)
    assert node.joules == {"held_idle": 340}
    node.counter -= 1.0  # a little back: that is no reset after which 9 GJ were used
    node.now_ns += S
    node.tick((9,), 0.0)
    node.use(100)
    assert node.joules == {"held_idle": 440}


def test_without_a_counter_nothing_is_served_and_nothing_is_kept() -> None:
    node = Metered(None)
    node.tick((9,), 0.0)
    node.use(0, seconds=50)
    account = node.book.accounts[UUID]
    assert node.energy == EnergyAccount()
    served = {sample.metric for sample in exporter.gpu_samples(account, TABLE, 0)}
    assert served and not any("energy" in metric for metric in served)


def test_time_before_the_first_reading_that_is_booked_later_has_no_energy() -> None:
    node = Metered(None)
    node.tick((), 0.0)
    node.use(0, (), seconds=10)
    node.counter = 5e6
    node.use(
        100, (), seconds=30
    )  # the first of these readings is where the account begins; the last 11 s are still open
    assert node.joules == {"unallocated": (29 - 11) * 100}
    node.use(100, (9,))
    assert node.counter is not None and sum(node.joules.values()) == node.counter - 5e6 - 100


def test_a_counter_that_fails_for_a_while_loses_nothing() -> None:
    node = Metered()
    node.tick((9,), 0.0)
    node.use(100, seconds=2)
    counter, node.counter = node.counter, None
    node.use(0, seconds=6)
    assert node.joules == {"held_idle": 200}
    assert counter is not None
    node.counter = counter + 700 - 100
    node.use(100)
    assert node.joules == {"held_idle": 900}


def test_a_counter_that_is_gone_for_long_costs_little_memory() -> None:
    account, ledger = EnergyAccount(), MeteredLedger(0)
    ledger.energy = account
    account.read(1000.0, 0)
    for second in range(1, 5000):
        ledger.book("compute", second * S - 500 * MS)
        ledger.book("input_wait", second * S)
        account.read(None, second * S)
    assert len(msgspec.msgpack.encode(account)) < 200
    account.read(1000.0 + 5000 * 100, 5000 * S)
    assert {state: round(each) for state, each in account.joules.items()} == {"compute": 249_950, "input_wait": 249_950}


def test_readings_of_a_ledger_that_does_not_move_are_bounded() -> None:
    account, ledger = EnergyAccount(), MeteredLedger(0)
    ledger.energy = account
    for second in range(5000):
        account.read(1000.0 + 100 * second, second * S)
    assert len(account.readings) <= 600
    ledger.book("compute", 4999 * S)
    assert account.joules == {"compute": 499_900} and len(account.readings) == 1


def test_a_reading_that_comes_every_30_seconds_is_spread_over_its_time() -> None:
    """As a dcgm-exporter's, whose page repeats the last one until then."""
    node = Metered()
    node.tick((9,), 0.0)
    for second in range(1, 61):
        node.now_ns += S
        node.counter = 5e6 + (9000.0 * (second // 30))
        node.tick((9,), 0.9 if second <= 15 else 0.0)
    assert node.joules == {"busy_unattributed": 4500, "held_idle": 13_500}


def test_sums_equal_the_counter_whatever_happens() -> None:
    chance = random.Random(7)
    ledger, counter, now_ns, watermark = MeteredLedger(0), 1e6, 0, 0
    ledger.energy.read(counter, 0)
    states = ("compute", "input_wait", "host_wait", "held_idle")
    for _ in range(3000):
        now_ns += chance.choice((1, 20 * MS, S, S, S, 7 * S))
        counter += chance.random() * 700 * min(1.0, now_ns / 1e9)
        while watermark < now_ns and chance.random() < 0.9:
            watermark = min(now_ns, watermark + chance.randrange(1, 3 * S))
            ledger.book(chance.choice(states), watermark)
        ledger.energy.read(counter if chance.random() < 0.8 else None, now_ns)
        if chance.random() < 0.05:
            kept = msgspec.msgpack.encode(ledger.energy)
            ledger.energy = msgspec.msgpack.decode(kept, type=EnergyAccount)
    now_ns += S
    ledger.book("compute", now_ns)
    ledger.energy.read(counter := counter + 1.0, now_ns)
    assert sum(ledger.energy.joules.values()) == pytest.approx(counter - 1e6, rel=1e-9)
    assert min(ledger.energy.joules.values()) >= 0 and ledger.sum_ns == now_ns
    assert len(ledger.energy.readings) <= 2


def test_no_power_of_a_real_gpu_counts_as_a_jump() -> None:
    assert MOST_WATTS >= 2 * 1400  # a GB300's limit is 1,400 W


def test_kinds_are_served_from_the_first_reading_on_and_states_in_the_history_alone() -> None:
    node = Metered()
    node.tick((9,), 0.0)
    node.use(80, seconds=2)
    found = list(exporter.gpu_samples(node.book.accounts[UUID], TABLE, 0))
    kinds = {s.labels[2]: s.value for s in found if s.metric == "gpuwatch_gpu_energy_joules_total"}
    assert kinds == {"working": 0, "waiting": 0, "idle": 160, "unknown": 0}
    states = [s for s in found if s.metric == "gpuwatch_gpu_state_energy_joules_total"]
    assert states == [Sample("gpuwatch_gpu_state_energy_joules_total", 160, ("0", UUID, "held_idle"))]
    assert all(BY_NAME[s.metric].when == "history" for s in states) and states == list(exporter.standard(states))
