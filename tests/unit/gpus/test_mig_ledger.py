"""A GPU that is split by MIG: what is read of its instances, and their accounts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpuwatch.metrics import Sample
from gpuwatch_agent import exporter
from gpuwatch_agent.collectors.drivers import DriverCollector, GpuDevice
from gpuwatch_agent.gpus import GpuLedgers, GpuReading, GpuRecord
from gpuwatch_agent.gpus.readings import dense_peak, gpu_readings
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs.window import RecentSamples
from tests.unit.agent.hooks import BOOT, S

H100 = "NVIDIA H100 80GB HBM3"
REST = GpuDevice(0, "GPU-0", H100, "00000000:3B:00.0", 0, size_ratio=2 / 7)
TRAIN = GpuDevice("0:0", "MIG-a", f"{H100} MIG 3g.40gb", REST.pci_bus_id, None, ("1", "3g.40gb"), 3 / 7)
OTHER = GpuDevice("0:1", "MIG-b", f"{H100} MIG 2g.20gb", REST.pci_bus_id, None, ("5", "2g.20gb"), 2 / 7)
WHOLE = GpuDevice(1, "GPU-1", H100, "00000000:5E:00.0", 1)


class Driver(DriverCollector):
    """A driver that has answered."""

    def __init__(self, **listed: tuple[int, ...]) -> None:
        self._listed = {uuid.replace("_", "-"): pids for uuid, pids in listed.items()}
        self.sm_utilization = {}

    def devices(self) -> tuple[GpuDevice, ...]:
        return REST, TRAIN, OTHER, WHOLE

    def processes(self) -> dict[str, tuple[int, ...]]:
        return self._listed

    def process_list_age_s(self, uuid: str) -> float:
        return 0.0


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    for pid in (10, 11, 20, 30):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text("python\n")
    return ProcessTable(tmp_path)


def held(table: ProcessTable, **listed: tuple[int, ...]) -> dict[str, tuple[int, ...] | None]:
    return {each.uuid: each.pids for each in gpu_readings(Driver(**listed), RecentSamples(), table, {})}


def test_a_split_gpu_holds_what_is_in_none_of_its_instances(table: ProcessTable) -> None:
    known = held(table, GPU_0=(10, 11, 20), MIG_a=(10, 11), MIG_b=(20,), GPU_1=(30,))
    assert known == {"GPU-0": (), "MIG-a": (10, 11), "MIG-b": (20,), "GPU-1": (30,)}
    # an instance whose processes could not be listed, or that the agent may not see
    assert held(table, GPU_0=(10, 20), MIG_a=(10,))["GPU-0"] == (20,)
    assert held(table, MIG_a=(10,), MIG_b=()) == {"GPU-0": None, "MIG-a": (10,), "MIG-b": (), "GPU-1": None}


def test_an_instance_is_active_by_its_engines(table: ProcessTable) -> None:
    node = RecentSamples()
    seen = {("0", "GPU-0"): 0.9, ("0:0", "MIG-a"): 0.3}
    node.remember([Sample("gpuwatch_gpu_engine_active_ratio", value, key) for key, value in seen.items()], 0)
    found = gpu_readings(Driver(), node, table, {})
    assert [(each.gpu, each.utilization_ratio, each.size_ratio) for each in found] == [
        ("0", None, 2 / 7),
        ("0:0", 0.3, 3 / 7),
        ("0:1", None, 2 / 7),
        ("1", None, 1.0),
    ]


def test_no_peak_is_known_of_an_instance() -> None:
    assert dense_peak(H100) is not None and dense_peak(TRAIN.name) is None


def split() -> list[GpuReading]:
    """Return GPU 0 and its two instances, held and without work."""
    rest = GpuReading("0", "GPU-0", (), None, allocated=(), size_ratio=2 / 7)
    sizes = {"0:0": 3 / 7, "0:1": 2 / 7}
    return [rest, *(GpuReading(gpu, f"MIG-{gpu}", (10,), 0.0, size_ratio=size) for gpu, size in sizes.items())]


class Node:
    """A split GPU and a clock of whole seconds."""

    def __init__(self) -> None:
        self.book, self.now_ns, self.joules = GpuLedgers(), 1000 * S, 0.0

    def second(self, sizes: dict[str, float], pids: tuple[int, ...] = (), seconds: int = 1) -> None:
        """Pass time with these GPUs and instances, by label and size; `pids` hold the instances, and nothing runs."""
        for _ in range(seconds):
            self.now_ns += S
            self.joules += 100.0
            readings = [
                GpuReading(gpu, f"MIG-{gpu}", pids, 0.0, size_ratio=size)
                if ":" in gpu
                else GpuReading(gpu, f"GPU-{gpu}", (), None, allocated=(), energy_joules=self.joules, size_ratio=size)
                for gpu, size in sizes.items()
            ]
            self.book.advance(readings, {}, self.now_ns)

    def served(self, table: ProcessTable, name: str = "gpuwatch_gpu_seconds_total") -> dict[tuple[str, str], float]:
        """Values above 0 by (UUID, state)."""
        samples = (s for account in self.book.accounts.values() for s in exporter.gpu_samples(account, table, 0))
        return {s.labels[1:3]: s.value for s in samples if s.metric == name and s.value}  # type: ignore[misc]


SPLIT = {"0": 2 / 7, "0:0": 3 / 7, "0:1": 2 / 7}


def test_seconds_of_instances_and_the_rest_sum_to_the_gpus(table: ProcessTable) -> None:
    node = Node()
    node.second(SPLIT, pids=(10,), seconds=141)
    found = node.served(table)
    # a process that is not listed yet may be on the rest: it is booked eleven seconds late
    expected = {("MIG-0:0", "held_idle"): 60, ("MIG-0:1", "held_idle"): 40, ("GPU-0", "free"): 129 * 2 / 7}
    assert found == pytest.approx(expected)
    energy = node.served(table, "gpuwatch_gpu_energy_joules_total")
    assert energy == {("GPU-0", "unknown"): pytest.approx(12_900)}  # which instance used it is not measured


def test_account_of_another_size_begins_again_and_that_of_a_destroyed_instance_ends(table: ProcessTable) -> None:
    node = Node()
    node.second(SPLIT, pids=(10,), seconds=15)
    node.second({"0": 0.0, "0:0": 3 / 7, "0:2": 4 / 7}, pids=(10,), seconds=8)
    assert node.book.accounts.keys() == {"GPU-0", "MIG-0:0", "MIG-0:2"}
    assert node.served(table) == pytest.approx(
        {("MIG-0:0", "held_idle"): 22 * 3 / 7, ("MIG-0:2", "held_idle"): 7 * 4 / 7}
    )
    node.second({"0": 1.0}, seconds=15)
    assert node.served(table) == {("GPU-0", "free"): pytest.approx(3)}


def test_instances_of_a_gpu_that_does_not_answer_are_unknown(table: ProcessTable) -> None:
    node = Node()
    node.second({**SPLIT, "1": 1.0}, pids=(10,), seconds=15)
    node.second({"1": 1.0}, seconds=14)
    found = node.served(table)
    assert {uuid: s for (uuid, state), s in found.items() if state == "unknown"} == pytest.approx(
        {"GPU-0": 14 * 2 / 7, "MIG-0:0": 14 * 3 / 7, "MIG-0:1": 14 * 2 / 7}, abs=0.01
    )


def test_instances_of_a_lost_gpu_are_unknown_though_another_gpu_has_its_index_now(table: ProcessTable) -> None:
    node = Node()
    other = GpuReading("1", "GPU-1", (), 0.0, allocated=())
    for _ in range(15):
        node.now_ns += S
        node.book.advance([*split(), other], {}, node.now_ns)
    for _ in range(14):
        node.now_ns += S
        node.book.advance([replace(other, gpu="0")], {}, node.now_ns)
    unknown = {uuid: s for (uuid, state), s in node.served(table).items() if state == "unknown"}
    assert unknown == pytest.approx({"GPU-0": 14 * 2 / 7, "MIG-0:0": 14 * 3 / 7, "MIG-0:1": 14 * 2 / 7}, abs=0.01)
    assert sum(unknown.values()) == pytest.approx(14), "a GPU's seconds"


def test_sizes_survive_a_restart_of_the_agent(table: ProcessTable) -> None:
    node = Node()
    node.second(SPLIT, pids=(10,), seconds=15)
    before = node.served(table)["MIG-0:0", "held_idle"]
    records = [msgspec.msgpack.encode(account.record(BOOT)) for account in node.book.accounts.values()]
    node.book = GpuLedgers()
    node.book.restore([msgspec.msgpack.decode(each, type=GpuRecord) for each in records], BOOT, node.now_ns)
    node.second(SPLIT, pids=(10,), seconds=7)
    assert node.served(table)["MIG-0:0", "held_idle"] == pytest.approx(before + 3)
