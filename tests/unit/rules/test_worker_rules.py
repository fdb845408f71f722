"""Rules on what blocks loader workers: each fires on its cause, is quiet without it, abstains without its signal."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.input import (
    artificial_limit,
    input_cpu,
    input_cpu_saturated,
    input_disk,
    input_handover,
    input_network,
    slow_worker,
    too_many_workers,
)
from gpuwatch.diagnosis.rules.input_rhythm import burst_every_n, round_correlation
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import HostFacts, Window
from gpuwatch.host.frames import RECEIVING, Place
from gpuwatch.wire import Loader
from tests.unit.rules.windows import HEALTHY, STARVED, steps, window

NODE = HostFacts(cpu_cores=16, cpu_busy_ratio=0.2)


def at(kind: str, share: float = 0.9, base: Window = STARVED, **host: float) -> Window:
    """Return the window with its workers found at one thing."""
    return replace(base, worker_waits={kind: share, "other": 1 - share}, host=replace(NODE, **host))


def causes(looked_at: Window) -> list[str]:
    return [finding.cause for finding in diagnose(looked_at)]


def test_workers_at_the_disk() -> None:
    finding = input_disk(at("disk", disk_busy_ratio=0.99, disk_read_bytes_per_s=200 << 20, io_pressure_ratio=0.8))
    assert finding is not None
    assert finding.ratio == pytest.approx(0.6)
    assert [evidence.value for evidence in finding.evidence] == pytest.approx([0.6, 0.9, 0.8, 0.99])
    assert "200 MiB/s" in finding.evidence[3].text
    assert "num_workers" not in finding.advice  # the disk has nothing left to give
    assert finding.predicted_range is None


def test_a_disk_with_time_left_can_take_more_requests_at_a_time() -> None:
    finding = input_disk(at("disk", disk_busy_ratio=0.3))
    assert finding is not None
    assert "num_workers 4 → 10" in finding.advice
    assert finding.predicted_range == (1.0, 2.44)  # it is not known what the disk can give


def test_a_disk_that_was_not_measured_is_not_called_idle() -> None:
    """A node without disks of its own (its files come over NFS) has no figures of them."""
    finding = input_disk(at("disk"))
    assert finding is not None
    assert "; if the disk is not fully busy, num_workers 4 → 10" in finding.advice


def test_the_disk_is_quiet_when_workers_are_elsewhere_and_abstains_when_they_were_not_looked_at() -> None:
    assert input_disk(at("disk", 0.2)) is None
    assert input_disk(at("disk", base=HEALTHY)) is None
    assert input_disk(replace(STARVED, host=NODE)) is None
    assert causes(at("disk")) == ["input_disk"]


def test_workers_at_the_network() -> None:
    finding = input_network(at("network", network_receive_bytes_per_s=12e6))
    assert finding is not None
    assert [evidence.value for evidence in finding.evidence] == pytest.approx([0.6, 0.9, 12e6])
    assert "num_workers 4 → 10" in finding.advice
    assert finding.predicted_range == (1.0, 2.44)


def test_the_network_is_quiet_where_nothing_arrives_and_abstains_where_bytes_are_not_counted() -> None:
    assert input_network(at("network", network_receive_bytes_per_s=2e3)) is None
    assert input_network(at("network", 0.3, network_receive_bytes_per_s=12e6)) is None
    assert input_network(at("network")) is None
    assert input_network(replace(STARVED, host=replace(NODE, network_receive_bytes_per_s=12e6))) is None
    assert causes(at("network", network_receive_bytes_per_s=12e6)) == ["input_network"]


def test_workers_that_have_nothing_to_do_do_not_wait_for_the_network() -> None:
    """Found by the diagnosis benchmark: an idle worker polls its queue as another one polls a socket."""
    idle = replace(at("network", network_receive_bytes_per_s=12e6), worker_cpu_ratios=(0.97, 0.02, 0.02, 0.02))
    assert input_network(idle) is None


def test_workers_at_a_lock_while_nothing_is_full() -> None:
    finding = artificial_limit(at("lock"))
    assert finding is not None
    assert "More workers will not help" in finding.advice
    assert [evidence.value for evidence in finding.evidence] == pytest.approx([0.6, 0.9, 0.2])
    assert causes(at("lock")) == ["artificial_limit"]
    half = at("lock", 0.45)
    assert artificial_limit(half) is None
    two = replace(half, loader=replace(half.loader, num_workers=2))
    assert artificial_limit(two) is not None, "of two workers one holds the lock"


def test_a_lock_is_quiet_where_something_is_full_and_abstains_where_that_is_not_known() -> None:
    full = at("lock", cpu_busy_ratio=0.95)  # by others: a lock on a busy node was not named
    assert artificial_limit(full) is not None
    assert artificial_limit(replace(full, worker_busy_ratios=(0.9,) * 4)) is None
    assert artificial_limit(at("lock", disk_busy_ratio=0.95)) is None
    assert artificial_limit(at("lock", 0.3)) is None
    assert artificial_limit(replace(at("lock"), host=HostFacts(cpu_cores=16))) is None
    assert artificial_limit(STARVED) is None


def bursts(count: int, every: int, wait_s: float = 0.2) -> Window:
    """Return steps of which one in `every` waits."""
    columns = steps(count, 0.001, 0.040)
    waits = tuple(wait_s if index % every == 0 else 0.001 for index in range(count))
    return window(replace(columns, data_wait_s=waits))


def test_bursts_at_the_number_of_workers() -> None:
    finding = burst_every_n(bursts(80, 4))
    assert finding is not None
    assert finding.evidence[0].value > 0.95
    assert finding.evidence[1].value == pytest.approx(0.2 / 0.203)
    assert "prefetch_factor 2 → 4" in finding.advice


def test_bursts_are_quiet_at_another_period_or_for_an_even_wait_and_abstain_without_workers() -> None:
    assert burst_every_n(bursts(80, 5)) is None
    assert burst_every_n(STARVED) is None
    assert burst_every_n(bursts(12, 4)) is None  # too few rounds
    assert burst_every_n(replace(bursts(80, 4), loader=Loader())) is None
    assert burst_every_n(replace(bursts(80, 4), loader=Loader(num_workers=1))) is None


def test_bursts_are_looked_for_within_a_pass_only() -> None:
    whole = bursts(80, 4)
    firsts = tuple(index in (0, 50) for index in range(80))
    shifted = tuple(0.2 if (index - (index >= 50)) % 4 == 0 else 0.001 for index in range(80))
    assert (
        burst_every_n(replace(whole, steps=replace(whole.steps, data_wait_s=shifted, epoch_start=firsts))) is not None
    )


def test_bursts_need_waits_in_later_steps_that_are_worth_a_change() -> None:
    """Pauses of 3 s at each pass, and else 2 ms in every fourth step of 100 ms: "one slow step in every 4"."""
    columns = steps(120, 0.0002, 0.100, firsts=(0, 40, 80))
    waits = tuple(
        3.0 if first else 0.002 if number % 4 == 0 else 0.0002 for number, first in enumerate(columns.epoch_start)
    )
    assert causes(window(replace(columns, data_wait_s=waits))) == ["epoch_start_pause"]


def test_bursts_hang_under_what_makes_the_loader_slow() -> None:
    found = diagnose(replace(bursts(80, 4), worker_cpu_ratios=(0.97,) * 4))
    assert [(finding.cause, finding.root) for finding in found] == [("input_cpu", None), ("burst_every_n", "input_cpu")]


def test_autocorrelation_of_a_period_and_of_a_constant() -> None:
    two, same = (window(replace(steps(40, 3.0, 0.04), data_wait_s=waits)) for waits in ([1.0, 0.0] * 20, [3.0] * 40))
    assert round_correlation(two, THRESHOLDS, 2) == pytest.approx(1.0)
    assert round_correlation(two, THRESHOLDS, 1) == pytest.approx(-1.0)
    assert round_correlation(same, THRESHOLDS, 2) == 0.0
    assert round_correlation(two, THRESHOLDS, 11) is None


def test_one_worker_that_works_while_the_others_stand() -> None:
    finding = slow_worker(replace(bursts(80, 4), worker_cpu_ratios=(0.1, 0.95, 0.12, 0.08)))
    assert finding is not None
    assert finding.evidence[1].value == 0.95 and "the other 3: 10%" in finding.evidence[1].text


def test_a_slow_worker_is_quiet_for_even_ones_and_abstains_without_their_figures() -> None:
    assert slow_worker(replace(bursts(80, 4), worker_cpu_ratios=(0.9, 0.95, 0.9, 0.9))) is None
    assert slow_worker(replace(STARVED, worker_cpu_ratios=(0.1, 0.95, 0.12, 0.08))) is None  # no round
    assert slow_worker(replace(bursts(80, 4), worker_cpu_ratios=None)) is None
    assert slow_worker(replace(bursts(80, 4), worker_cpu_ratios=(0.1, 0.95))) is None


def test_a_worker_that_waits_is_slow_where_the_others_are_ahead() -> None:
    """One shard far away: no worker is busy, and no cause was named."""
    sleeping = replace(STARVED, worker_cpu_ratios=(0.02,) * 4, out_of_order_ratio=0.95)
    finding = slow_worker(sleeping)
    assert finding is not None and "later batches ready" in finding.evidence[1].text
    assert finding.evidence[1].value == 0.95
    assert causes(sleeping) == ["slow_worker"]
    assert slow_worker(replace(sleeping, out_of_order_ratio=0.3)) is None
    assert slow_worker(replace(sleeping, empty_fetch_ratio=0.25)) is not None
    assert slow_worker(replace(sleeping, empty_fetch_ratio=0.03)) is None, "a slow sampler's: batches were ready"
    assert slow_worker(replace(sleeping, worker_cpu_ratios=(0.7, 0.8, 0.7, 0.8))) is None, "no worker waits for another"
    assert slow_worker(replace(sleeping, out_of_order_ratio=None)) is None
    assert slow_worker(replace(sleeping, loader=Loader(num_workers=1))) is None


def test_a_training_thread_that_unpickles_is_the_handover() -> None:
    """48,000 small objects a batch: "the workers mostly sleep, 2 → 4" was advised, and got 0.89×."""
    unpickling = replace(
        STARVED, fetch_cpu_ratio=0.9, worker_cpu_ratios=(0.2,) * 4, ready_batches=3.8, empty_fetch_ratio=0.1
    )
    finding = input_handover(unpickling)
    assert finding is not None and finding.evidence[1].value == 0.9
    assert "num_workers" not in finding.advice and "more workers will not help" in finding.advice
    assert causes(unpickling) == ["input_handover"]
    assert causes(replace(unpickling, worker_cpu_ratios=(0.95,) * 4))[0] == "input_handover"
    assert input_handover(replace(unpickling, fetch_cpu_ratio=0.2)) is None
    seen = replace(unpickling, fetch_cpu_ratio=0.4, empty_fetch_ratio=0.6, fetch_place=Place(RECEIVING, "", 0, 0.7))
    assert causes(seen) == ["input_handover"], "on full cores it waits for one, and for the rest of a batch in the pipe"
    assert input_handover(replace(seen, fetch_place=Place(RECEIVING, "", 0, 0.4))) is None
    waits = "a worker whose interpreter's lock is taken by its own code sends late: more workers did help"
    assert input_handover(replace(seen, fetch_cpu_ratio=0.14)) is None, waits
    assert input_handover(replace(seen, fetch_place=Place("tokenize", "data.py", 7, 0.7))) is None
    assert input_handover(replace(unpickling, fetch_cpu_ratio=None)) is None
    assert input_handover(replace(unpickling, loader=Loader(num_workers=0))) is None
    assert input_handover(replace(HEALTHY, fetch_cpu_ratio=0.9)) is None
    full = HostFacts(cpu_cores=2, cpu_busy_ratio=0.97)  # there it waits for a core, which looks like work
    assert input_handover(replace(unpickling, fetch_cpu_ratio=0.6, host=full)) is None
    assert input_handover(replace(unpickling, fetch_cpu_ratio=0.6)) and input_handover(replace(unpickling, host=full))
    # on full cores a thread that is woken waits for one, and no batch is ready
    assert input_handover(replace(unpickling, empty_fetch_ratio=0.9)) is None
    wrapped = replace(unpickling, empty_fetch_ratio=None)
    assert input_handover(wrapped) is None
    assert input_handover(replace(wrapped, fetch_place=Place("normalize", "/me/data.py", 3, 0.8))) is not None


def test_a_sampler_s_own_time_is_no_handover_of_batches() -> None:
    """A sampler that sorts all scores for each batch: "it unpickles the batch", and advice to return large tensors."""
    sampling = replace(STARVED, fetch_cpu_ratio=0.9, empty_fetch_ratio=0.1, worker_cpu_ratios=(0.2,) * 4)
    finding = input_handover(replace(sampling, fetch_place=Place("Miner.mine", "/me/data.py", 3, 0.32)))
    assert finding is not None and finding.title == "the training thread itself works in a fetch, in Miner.mine"
    assert finding.advice.startswith("make Miner.mine cheaper") and "tensors" not in finding.advice


def test_the_function_that_workers_spend_their_fetches_in_is_named() -> None:
    """It was not known without an agent.

    A wait for workers that neither compute nor sleep measurably was "not proven".
    """
    place = Place("Tokenizer.encode", "data.py", 41, 0.64)
    for cpu, host, cause in (
        (0.02, HostFacts(), "input_unexplained"),
        (0.95, HostFacts(cpu_cores=2, cpu_busy_ratio=0.97), "input_cpu_saturated"),
        (0.95, HostFacts(cpu_cores=16, cpu_busy_ratio=0.3), "input_cpu"),
    ):
        named = replace(STARVED, worker_cpu_ratios=(cpu,) * 4, host=host, worker_place=place)
        (finding,) = (each for each in diagnose(named) if each.cause == cause)
        assert finding.evidence[-1].text == "64% of a worker's fetch is in Tokenizer.encode (data.py:41)"
        assert ("Tokenizer.encode" in finding.title) == (cause == "input_unexplained")
    rare = replace(STARVED, worker_cpu_ratios=(0.02,) * 4, worker_place=place._replace(ratio=0.4))
    (finding,) = (each for each in diagnose(rare) if each.cause == "input_unexplained")
    assert finding.title.endswith("no cause is proven")
    alone = replace(STARVED, loader=Loader(num_workers=0), worker_place=place)
    assert "worker's fetch" not in str(diagnose(alone)), "of an earlier loader"


def test_more_workers_are_only_said_not_to_help_where_the_cores_are_full() -> None:
    """At 76% of the cores they were reported not to help, and did: 1.27×."""
    given = replace(STARVED, worker_cpu_ratios=(0.95,) * 4)
    for busy, words in ((0.76, "measure the effect (gpuwatch tune)"), (0.97, "more workers will not help")):
        finding = input_cpu_saturated(replace(given, host=HostFacts(cpu_cores=4, cpu_busy_ratio=busy)))
        assert finding is not None and finding.advice.endswith(words)


CROWDED = HostFacts(cpu_cores=2, cpu_busy_ratio=0.99, cpu_pressure_ratio=0.9)
PUSHING = {"worker_cpu_ratios": (0.12,) * 16, "worker_busy_ratios": (0.95,) * 16}
"""16 workers on two cores: each has an eighth of one, and waits for it at all other times."""


def test_more_workers_than_cores_can_carry() -> None:
    loader = Loader(num_workers=16, prefetch_factor=2, batch_bytes=1 << 20)
    finding = too_many_workers(replace(HEALTHY, host=CROWDED, loader=loader, **PUSHING))
    assert finding is not None
    assert finding.advice.startswith("num_workers 16 → 2")  # the two cores that they have together
    assert "28 MiB of /dev/shm" in finding.advice  # 14 workers' queues
    assert finding.evidence[0].value == 16


def test_too_many_workers_is_quiet_on_cores_enough_and_abstains_without_pressure_figures() -> None:
    many = replace(HEALTHY, host=CROWDED, loader=Loader(num_workers=16), **PUSHING)
    assert too_many_workers(many) is not None
    assert too_many_workers(replace(many, host=replace(CROWDED, cpu_cores=16))) is None
    assert too_many_workers(replace(many, host=replace(CROWDED, cpu_busy_ratio=0.5))) is None
    assert too_many_workers(replace(many, host=replace(CROWDED, cpu_pressure_ratio=None))) is None
    assert too_many_workers(replace(many, loader=Loader())) is None
    assert too_many_workers(replace(many, worker_cpu_ratios=None, worker_busy_ratios=None)) is None


def test_workers_that_sleep_on_a_node_that_others_fill_are_not_too_many() -> None:
    asleep = {"worker_cpu_ratios": (0.01,) * 16, "worker_busy_ratios": (0.05,) * 16}
    assert too_many_workers(replace(HEALTHY, host=CROWDED, loader=Loader(num_workers=16), **asleep)) is None


def test_too_many_workers_hang_under_saturated_cores() -> None:
    starved = replace(STARVED, host=CROWDED, loader=Loader(num_workers=16), **PUSHING)
    found = diagnose(starved)
    assert [(finding.cause, finding.root) for finding in found] == [
        ("input_cpu_saturated", None),
        ("too_many_workers", "input_cpu_saturated"),
    ]


def test_workers_that_sleep_on_a_node_that_others_fill_do_not_lack_cores() -> None:
    """Found by the prediction benchmark."""
    full = replace(STARVED, host=CROWDED, worker_cpu_ratios=(0.12,) * 4)
    assert input_cpu_saturated(replace(full, worker_busy_ratios=(0.95,) * 4)) is not None
    assert input_cpu_saturated(replace(full, worker_busy_ratios=(0.2,) * 4)) is None
    assert input_cpu_saturated(full) is not None  # a kernel that does not tell the time in the queue


def test_queues_of_arrays_take_no_dev_shm() -> None:
    """Workers send numpy's arrays through a pipe: "takes up to 120 MiB of /dev/shm", and 4 workers were the most."""
    small = HostFacts(cpu_cores=16, cpu_busy_ratio=0.2, shm_size_bytes=64 << 20, shm_used_bytes=0)
    starved = replace(STARVED, worker_cpu_ratios=(0.95,) * 4, host=small)
    assert input_cpu(starved) is None, "no room for more queues of tensors"
    found = input_cpu(replace(starved, loader=replace(starved.loader, shared_bytes=0)))
    assert found is not None and "num_workers 4 → 10" in found.advice and "/dev/shm" not in found.advice
    loader = Loader(num_workers=16, batch_bytes=1 << 20, shared_bytes=1 << 18)
    fewer = too_many_workers(replace(HEALTHY, host=CROWDED, loader=loader, **PUSHING))
    assert fewer is not None and "7 MiB of /dev/shm" in fewer.advice
