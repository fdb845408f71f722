"""What an agent knows of a run's last minute; its ranks, compared over the time that all of them are known for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch.diagnosis.prediction import free_cores
from gpuwatch.diagnosis.window import HostFacts
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.views import recent_view
from gpuwatch_agent.runs.window import ranks_by_run, run_window
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s
from tests.unit.doctor.machines import write
from tests.unit.processes.test_processes import put

TABLE = ProcessTable(Path("/nowhere"))


def reported(rank: int, steps: int, data_ms: int, at_ns: int = 100 * S, run: str = "run-a") -> Run:
    hook = FakeHook(at_ns, run=run, rank=rank, sender=f"sender-{run}-{rank}", pid=4711 + rank)
    made = Run(run, rank, BOOT)
    for _ in range(steps):
        hook.step(data_ns=data_ms * MS, compute_ns=(100 - data_ms) * MS)
    for message in (hook.hello(), hook.message()):
        made.apply(message, hook.at_ns, wall_s(hook.at_ns))
    return made


def test_means_are_over_the_same_time_and_first_batches_are_left_out() -> None:
    late_to_tell = reported(1, 11, 60, at_ns=100 * S + 1500 * MS)
    [facts] = ranks_by_run([reported(0, 31, 10), late_to_tell], TABLE).values()
    assert [(each.rank, each.step.steps) for each in facts] == [(0, 11), (1, 10)]
    assert (facts[0].step.wait_s, facts[1].step.wait_s) == (pytest.approx(0.010), pytest.approx(0.060))
    assert facts[1].step.compute_s == pytest.approx(0.040) and facts[1].comm_wait_s is None


def test_one_rank_or_one_that_is_gone_or_silent_is_not_compared() -> None:
    gone, silent = reported(1, 10, 10), reported(2, 10, 10)
    gone.status, silent.activity = "lost", "silent"
    assert ranks_by_run([reported(0, 10, 10), gone, silent, reported(0, 10, 10, run="run-b")], TABLE) == {}


def test_the_wait_for_others_is_a_mean_only_where_every_step_has_it() -> None:
    one, other = reported(0, 11, 10), reported(1, 0, 10)
    hook = FakeHook(run="run-a", rank=1, sender="sender-b", pid=4712)
    for _ in range(11):
        hook.step(data_ns=10 * MS, compute_ns=90 * MS)
    message = hook.message()
    waits = {**message.columns, "comm_wait_ns": wire.pack([5 * MS] * 11)}
    other.apply(msgspec.structs.replace(message, columns=waits), hook.at_ns, wall_s(hook.at_ns))
    [facts] = ranks_by_run([one, other], TABLE).values()
    assert (facts[0].comm_wait_s, facts[1].comm_wait_s) == (None, pytest.approx(0.005))


@pytest.mark.parametrize("bound", [True, False])
def test_ranks_that_are_bound_to_cores_of_their_own_share_those_of_all(bound: bool, tmp_path: Path) -> None:
    """`srun --ntasks-per-node=4 --cpus-per-task=4`: a rank's 4 cores were shared out among 4 ranks."""
    runs = [reported(rank, 10, 10) for rank in range(4)]
    for rank in range(4):
        put(tmp_path, 4711 + rank)
        listed = f"{4 * rank}-{4 * rank + 3}" if bound else "0-15"
        (tmp_path / str(4711 + rank) / "status").write_text(f"Cpus_allowed_list:\t{listed}\n")
    table = ProcessTable(tmp_path)
    [facts] = ranks_by_run(runs, table).values()
    window = run_window(runs[3], HostFacts(cpu_cores=64), (), WorkerWatch(table), 101 * S, facts)
    assert window.host.cpu_cores == 16
    assert free_cores(window) == 3


LIMITS = {"cpu.max": "1200000 100000\n", "memory.max": f"{64 << 30}\n", "memory.current": f"{4 << 30}\n"}


@pytest.mark.parametrize(
    ("apart", "limits", "cores"),
    [(True, [*LIMITS], 11), (True, ["cpu.max"], 2), (True, [], 15), (False, [*LIMITS], 2)],
)
def test_ranks_in_pods_of_their_own_do_not_share_a_pods_limits(
    apart: bool, limits: list[str], cores: int, tmp_path: Path
) -> None:
    """Of four pods of one GPU and 12 cores each on a node, each had "2 cores" left in findings: 12 / 4 - 1."""
    runs = [reported(rank, 10, 10) for rank in range(4)]
    for rank in range(4):
        put(tmp_path / "proc", 4711 + rank)
        pod = f"kubepods/pod{rank if apart else 0}"
        about = {"status": "Cpus_allowed_list:\t0-63\n", "cgroup": f"0::/{pod}\n"}
        write(tmp_path / f"proc/{4711 + rank}", about)
        write(tmp_path / f"sys/fs/cgroup/{pod}", {"cpu.max": "max 100000\n", **{name: LIMITS[name] for name in limits}})
    table = ProcessTable(tmp_path / "proc", tmp_path / "sys")
    [facts] = ranks_by_run(runs, table).values()
    window = run_window(runs[3], HostFacts(cpu_cores=64), (), WorkerWatch(table), 101 * S, facts)
    assert (window.host.cpu_cores, len(window.ranks)) == (12 if limits else 64, 4)
    assert free_cores(window) == cores


@pytest.mark.parametrize("step_s", [5, 15, 30, 60])
def test_the_rate_of_a_few_long_steps_is_that_of_all_their_time(step_s: int, tmp_path: Path) -> None:
    """Of two steps of 30 s the time of one was counted: twice the tokens a second, and twice the MFU."""
    hook, run = FakeHook(1000 * S), Run("run-a", 0, BOOT)
    run.apply(hook.hello(), hook.at_ns, wall_s(hook.at_ns))
    for _ in range(60 // step_s):
        hook.step(0, step_s * S)
        run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    run.remember(hook.at_ns)
    window = run_window(run, HostFacts(), (), WorkerWatch(ProcessTable(tmp_path)), hook.at_ns, ())
    recent = recent_view(run, window)
    assert recent is not None
    assert recent.steps_per_s == pytest.approx(1 / step_s)
    assert recent.samples_per_s == pytest.approx(8 / step_s)
