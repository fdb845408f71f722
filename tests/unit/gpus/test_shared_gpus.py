"""A GPU that several owners' processes hold: whose its time is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.metrics import Sample
from gpuwatch.tools.reports.gather import _cost
from gpuwatch.tools.reports.ledgers import of_runs
from gpuwatch_agent import exporter
from gpuwatch_agent.collectors.drivers import DriverCollector, GpuDevice
from gpuwatch_agent.gpus import Account, GpuLedgers, GpuReading, GpuRecord
from gpuwatch_agent.gpus.readings import gpu_readings, note_gpus, shares
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.owners import Owner
from gpuwatch_agent.runs import ENDED, RUNNING, Run, read_record
from gpuwatch_agent.runs.views import run_view
from gpuwatch_agent.runs.window import RecentSamples
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s

UUID = "GPU-1"


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    """Processes 10 and 11 of job 7, 20 of job 8, 30 the MPS server."""
    for pid, name, job in ((10, "python", 7), (11, "python", 7), (20, "python", 8), (30, "nvidia-cuda-mps", 0)):
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "comm").write_text(f"{name}\n")
        (directory / "environ").write_bytes(f"SLURM_JOB_ID={job}\0".encode() if job else b"")
    return ProcessTable(tmp_path)


def by_job(found: dict[Account, float]) -> dict[str, float]:
    return {job: share for (_, job, _, _), share in found.items()}


def test_shares_are_by_the_processes_use_of_the_multiprocessors(table: ProcessTable) -> None:
    assert by_job(shares((10, 11, 20), {10: 0.1, 11: 0.2, 20: 0.1}, table)) == pytest.approx({"7": 0.75, "8": 0.25})
    assert by_job(shares((10, 20), {10: 0.3}, table)) == {"7": 1.0, "8": 0.0}
    assert by_job(shares((10, 20), {10: 0.3, 99: 0.7}, table)) == {"7": 1.0, "8": 0.0}  # one that is no longer listed


def test_processes_that_use_nothing_share_it_equally(table: ProcessTable) -> None:
    assert by_job(shares((10, 11, 20), {}, table)) == pytest.approx({"7": 2 / 3, "8": 1 / 3})
    assert by_job(shares((10, 20), {10: 0.0, 20: 0.0}, table)) == {"7": 0.5, "8": 0.5}


def test_one_owner_shares_with_no_one(table: ProcessTable) -> None:
    assert shares((10, 11), {10: 0.5}, table) == {} == shares((10,), {}, table) == shares((), {}, table)


class Driver(DriverCollector):
    """A driver that has answered."""

    def __init__(self, *pids: int, used: dict[int, float] | None = None) -> None:
        self._listed, self.sm_utilization = pids, {UUID: used or {}}

    def devices(self) -> tuple[GpuDevice, ...]:
        return (GpuDevice(0, UUID, "NVIDIA H100", "", 0),)

    def processes(self) -> dict[str, tuple[int, ...]]:
        return {UUID: self._listed}

    def process_list_age_s(self, uuid: str) -> float:
        return 0.0


def test_the_clients_of_an_mps_server_hold_the_gpu(table: ProcessTable) -> None:
    (one,) = gpu_readings(Driver(10, 20, 30, used={10: 0.6, 20: 0.2, 30: 0.1}), RecentSamples(), table, {})
    assert one.pids == (10, 20) and by_job(dict(one.shares)) == pytest.approx({"7": 0.75, "8": 0.25})
    (alone,) = gpu_readings(Driver(30), RecentSamples(), table, {})
    assert alone.pids == () and alone.shares == {}  # it outlives its clients, and would be an idle holder for ever


class Node:
    def __init__(self) -> None:
        self.book, self.now_ns = GpuLedgers(), 1000 * S

    def second(self, shared: dict[Account, float], seconds: int = 1, each_ns: int = S) -> None:
        for _ in range(seconds):
            self.now_ns += each_ns
            reading = GpuReading("0", UUID, (1, 2), 0.5, shares=shared)
            self.book.advance([reading], {}, self.now_ns)

    @property
    def shared_s(self) -> dict[str, float]:
        return {user: seconds for (user, *_), seconds in self.book.accounts[UUID].shared_s.items()}


def test_time_is_divided_while_it_is_shared_and_survives_a_restart() -> None:
    node = Node()
    node.second({})
    node.second({}, 5)
    node.second({("alice", "", "", ""): 0.75, ("bob", "", "", ""): 0.25}, 8)
    node.second({}, 5)
    assert node.shared_s == {"alice": 6.0, "bob": 2.0}
    record = msgspec.msgpack.encode(node.book.accounts[UUID].record(BOOT))
    node.book = GpuLedgers()
    node.now_ns += 100 * S
    node.book.restore([msgspec.msgpack.decode(record, type=GpuRecord)], BOOT, node.now_ns)
    node.second({("alice", "", "", ""): 0.5, ("carol", "", "", ""): 0.5})  # the first second of an agent is not its own
    node.second({("alice", "", "", ""): 0.5, ("carol", "", "", ""): 0.5}, 2)
    assert node.shared_s == {"alice": 7.0, "bob": 2.0, "carol": 1.0}
    node.second({("bob", "", "", ""): 0.5, ("carol", "", "", ""): 0.5}, each_ns=60 * S)  # nothing was seen for a minute
    assert node.shared_s == {"alice": 7.0, "bob": 2.0, "carol": 1.0}


def test_owners_that_come_and_go_are_bounded() -> None:
    node = Node()
    node.second({})
    for number in range(100):
        node.second({("alice", "", "", ""): 0.5, ("", str(number), "", ""): 0.5})
    found = node.book.accounts[UUID].shared_s
    assert len(found) == 32 and found["alice", "", "", ""] == 50.0 and ("", "99", "", "") in found


def test_the_runs_of_a_shared_gpu_are_charged_for_its_time_once(table: ProcessTable) -> None:
    """Run a holds it alone for 10 s, then with b's process for 20 s, then b holds it alone for 10 s.

    While they share it, a uses 3 of 4 kernels.
    """
    book, runs = GpuLedgers(), {10: Run("a", 0, BOOT), 20: Run("b", 0, BOOT)}
    hooks = {pid: FakeHook(1000 * S, run=run.run) for pid, run in runs.items()}
    for pid, run in runs.items():
        run.owner = table.owner(pid)
    prices = Prices(gpu_hour=3600.0)  # a second is 1

    def views() -> tuple[api.Run, ...]:
        return tuple(run_view(run, prices) for run in runs.values())

    for second in range(1, 41):
        pids = [pid for pid, seen in ((10, second <= 30), (20, second > 10)) if seen]
        for pid in pids:
            hook = hooks[pid]
            if pid == 20 and second == 11:
                hook = hooks[pid] = FakeHook((1000 + second - 1) * S, run="b")
            hook.step(data_ns=400 * MS, compute_ns=600 * MS)
            for message in (hook.hello(), hook.message()):
                runs[pid].apply(message, hook.at_ns, wall_s(hook.at_ns))
        driver = Driver(*pids, used={10: 0.6, 20: 0.2})
        if second == 31:
            runs[10].status = ENDED
        book.advance(gpu_readings(driver, RecentSamples(), table, {}), {p: runs[p] for p in pids}, (1000 + second) * S)
        note_gpus(runs.values(), book.accounts.values(), driver)
        if second == 20:
            assert [run.gpus for run in views()] == [("NVIDIA H100",)] * 2
            assert [run.gpu_share for run in views()] == pytest.approx([(10 + 7.5) / 20, 0.25])
    a, b = views()
    assert a.cost is not None and b.cost is not None
    assert (a.cost.total, b.cost.total) == pytest.approx((10 + 15, 5 + 10))
    assert a.cost.states["compute"] == pytest.approx(0.6 * 25)
    held = [of_runs([run])["gpu_hours"] for run in (a, b)]
    assert [each["all"] * 3600 for each in held] == pytest.approx([25, 15])
    both = _cost((a, b), Prices(gpu_hour=1800.0))
    assert both is not None and both.total == pytest.approx(40 / 2)
    kept = runs[20].record()
    assert kept is not None and run_view(read_record(kept), prices).cost == b.cost


@pytest.mark.parametrize("second_owner", ["run b", "no hook"])
def test_the_energy_of_a_shared_gpu_is_divided_as_its_time_is(table: ProcessTable, second_owner: str) -> None:
    """Run a has it alone for 10 s, then with another job for 10 s, then that job alone for 10 s.

    The other job uses 1 of 4 kernels. For the last 20 s the GPU is idle and unowned. It draws 400 W, idle 100 W.
    """
    book, runs = GpuLedgers(), {10: Run("a", 0, BOOT)} | ({20: Run("b", 0, BOOT)} if second_owner == "run b" else {})
    hooks = {pid: FakeHook((1000 + 10 * (pid == 20)) * S, run=run.run) for pid, run in runs.items()}
    for pid, run in runs.items():
        run.owner = table.owner(pid)
    joules = 7e6
    for second in range(51):
        pids = tuple(pid for pid, seen in ((10, second <= 20), (20, 10 < second <= 30)) if seen)
        joules += (400.0 if pids else 100.0) * (second > 0)
        for pid in {*pids} & {*runs} if second else ():
            hooks[pid].step(data_ns=400 * MS, compute_ns=600 * MS)
            runs[pid].apply(hooks[pid].message(), hooks[pid].at_ns, wall_s(hooks[pid].at_ns))
        for pid, run in runs.items():
            run.status = RUNNING if pid in pids else ENDED
        divided = shares(pids, {10: 0.6, 20: 0.2}, table)
        reading = GpuReading("0", UUID, pids, 0.9 * bool(pids), energy_joules=joules, shares=divided)
        book.advance([reading], {pid: runs[pid] for pid in pids if pid in runs}, (1000 + second) * S)
    found = {run.run: sum(run.energy_joules.values()) for run in runs.values()}
    unused = {
        state: each for state, each in book.accounts[UUID].ledger.energy.joules.items() if state not in RUN_STATES
    }
    if second_owner == "run b":
        assert found == pytest.approx({"a": 4000 + 3000, "b": 1000 + 4000})
        assert sum(found.values()) + sum(unused.values()) == pytest.approx(
            joules - 7e6 - 11 * 100
        )  # free time is booked late
        assert runs[10].energy_joules == pytest.approx({"compute": 0.6 * 7000, "input_wait": 0.4 * 7000})
    else:
        assert found == pytest.approx({"a": 4000 + 3000})


def test_two_runs_of_one_owner_have_half_of_a_gpu_each(table: ProcessTable) -> None:
    book, runs = GpuLedgers(), {10: Run("a", 0, BOOT), 11: Run("b", 0, BOOT)}
    hooks = {pid: FakeHook(1000 * S, run=run.run) for pid, run in runs.items()}
    for second in range(1, 11):
        for pid, hook in hooks.items():
            hook.step(compute_ns=940 * MS)
            runs[pid].apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
        reading = GpuReading("0", UUID, (10, 11), 0.5, energy_joules=400.0 * second)
        book.advance([reading], runs, (1000 + second) * S)
    assert [sum(run.energy_joules.values()) for run in runs.values()] == pytest.approx([1800.0, 1800.0])
    assert [run.lent_s for run in runs.values()] == pytest.approx([4.5, 4.5])  # of 9 s: the first sample is of no time


def test_shared_time_is_served_by_owner(table: ProcessTable) -> None:
    node = Node()
    node.second({})
    node.second({("alice", "7", "", ""): 0.75, ("", "", "ml", "pod-b"): 0.25}, 4)
    found = [s for s in exporter.gpu_samples(node.book.accounts[UUID], table, 0) if "shared" in s.metric]
    name = "gpuwatch_gpu_shared_seconds_total"
    assert found == [
        Sample(name, 3.0, ("0", UUID, "alice", "7", "", "")),
        Sample(name, 1.0, ("0", UUID, "", "", "ml", "pod-b")),
    ]


def test_pods_that_share_a_gpu_have_their_names_and_namespaces_from_the_kubelet(tmp_path: Path) -> None:
    """Two time-sliced pods of root's, without POD_NAMESPACE in their environment, use 3 and 1 of 4 kernels for 10 s."""
    for pid, pod in ((10, "train-0"), (20, "bert-0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(f"HOSTNAME={pod}\0".encode())
        uid = f"{pid:08d}-1111-2222-3333-444444444444"
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/{64 * 'a'}\n")
    table, book = ProcessTable(tmp_path), GpuLedgers()
    runs = {10: Run("a", 0, BOOT), 20: Run("b", 0, BOOT)}
    hooks = {pid: FakeHook(1000 * S, run=run.run) for pid, run in runs.items()}
    allocations = {UUID: (Owner(namespace="vision", pod="train-0"), Owner(namespace="nlp", pod="bert-0"))}
    driver = Driver(10, 20, used={10: 0.6, 20: 0.2})
    for second in range(1, 12):
        for pid, run in runs.items():
            run.owner = table.owner(pid)
            hooks[pid].step(data_ns=400 * MS, compute_ns=600 * MS)
            run.apply(hooks[pid].message(), hooks[pid].at_ns, wall_s(hooks[pid].at_ns))
        book.advance(gpu_readings(driver, RecentSamples(), table, allocations), runs, (1000 + second) * S)
        note_gpus(runs.values(), book.accounts.values(), driver)
    found = {key[2:]: seconds for key, seconds in book.accounts[UUID].shared_s.items()}
    assert found == pytest.approx({("vision", "train-0"): 7.5, ("nlp", "bert-0"): 2.5})
    assert [run.owner.namespace for run in runs.values()] == ["vision", "nlp"]
    assert [run.lent_s for run in runs.values()] == pytest.approx([2.5, 7.5])
