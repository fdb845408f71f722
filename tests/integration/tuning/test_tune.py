"""Loaders with a known truth, tuned for real: in processes, against the clock, within what the machine has."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpuwatch.api import LastSteps, Run, Runs
from gpuwatch.commands.tune import step_of_run
from gpuwatch.errors import ConfigError
from gpuwatch.tools.tuning import tune
from gpuwatch.tools.tuning.result import Failed, LeftOut, Measured, Setting, TuneResult, measured
from gpuwatch.tools.tuning.trial import descendants
from tests.memory_limit import memory_limit
from tests.servers import wait_for

pytestmark = pytest.mark.timeout(240)


class Items(Dataset[torch.Tensor]):
    """Each item sleeps, or computes, for so long."""

    def __init__(self, sleep_s: float = 0.0, compute_s: float = 0.0, floats: int = 16, count: int = 10_000) -> None:
        self.sleep_s, self.compute_s, self.floats, self.count = sleep_s, compute_s, floats, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        until = time.thread_time() + self.compute_s
        while time.thread_time() < until:
            sum(range(2000))
        return torch.zeros(self.floats)


class Stream(IterableDataset[torch.Tensor]):
    """Each worker gives items of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(10_000):
            time.sleep(0.02)
            yield torch.zeros(16)


class Dies(Items):
    """A worker that is killed."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Fails(Items):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("image 17 is truncated")


def loader_of(dataset: Any, batch_size: int = 4) -> Any:
    def make_loader(num_workers: int, prefetch_factor: int | None) -> DataLoader[torch.Tensor]:
        return DataLoader(dataset, batch_size, num_workers=num_workers, prefetch_factor=prefetch_factor)

    return make_loader


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie waits for its new parent alone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(result: TuneResult) -> list[int]:
    return [row.setting.num_workers for row in measured(result.rows)]


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.mark.alone
def test_a_fetch_that_sleeps_gets_exactly_the_workers_that_its_step_needs() -> None:
    # 4 × 50 ms = 200 ms a batch; 3 workers bring one every 67 ms, 2 every 100 ms; a step of 85 ms needs one in 76 ms.
    result = tune(loader_of(Items(sleep_s=0.05)), step_s=0.085, budget_s=12)
    assert result.chosen is not None and result.chosen.num_workers == 3, str(result)
    assert result.feeds is True
    by_workers = {row.setting.num_workers: row for row in reversed(measured(result.rows))}
    for workers in (0, 1, 2, 3, 4):
        assert by_workers[workers].batch_s == pytest.approx(0.2 / max(1, workers), rel=0.15)
    assert 8 not in workers_of(result)


@pytest.mark.alone
def test_a_fetch_that_computes_gets_no_more_workers_than_cores() -> None:
    result = tune(loader_of(Items(compute_s=0.005)), step_s=0.002, budget_s=6)
    assert result.feeds is False
    cores = result.cores
    assert max(workers_of(result)) <= cores
    left = [row.setting.num_workers for row in result.rows if isinstance(row, LeftOut) and row.limit != "budget"]
    assert all(workers > cores for workers in left)
    assert (
        "core" in result.why
    )  # on a shared machine two workers may bring no more than one; it is the cores all the same
    assert "nothing feeds a 2 ms step" in result.why
    assert any(row.main_cpu_ratio is not None for row in measured(result.rows))


@pytest.mark.alone
def test_an_iterable_dataset() -> None:
    result = tune(loader_of(Stream(), 2), step_s=0.030, budget_s=8)
    assert result.chosen is not None and result.chosen.num_workers == 2, str(result)  # 40 ms a batch: 20 ms with two


def test_ready_made_batches_are_timed_without_the_time_that_it_takes_to_count_them() -> None:
    """Each batch cost a sum over all before it: batches of 0.3 µs were reported as one every 140 µs."""
    row = measured(tune(lambda num_workers: [1.0] * 1_000_000, step_s=0.04, max_workers=0).rows)[0]
    assert row.batch_s < 2e-5, row.batch_s


def test_passes_of_a_single_ready_batch_are_not_kept_without_end() -> None:
    """A trial made 200,000 of them in two seconds, and reported their 50 MB as memory of the loader."""
    [row] = measured(tune(lambda num_workers: [1.0], step_s=0.04, max_workers=0).rows)
    assert row.batches == 1000 and not row.steady


def test_a_worker_that_dies_is_a_row_and_not_the_end() -> None:
    result = tune(loader_of(Dies(sleep_s=0.005)), step_s=0.010, budget_s=10)
    failed = [row for row in result.rows if isinstance(row, Failed)]
    assert failed and failed[0].setting.num_workers == 1
    assert failed[0].kind == "killed" and "worker" in failed[0].text
    assert result.chosen == Setting(0) and result.feeds is False


def test_a_dataset_that_fails_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        tune(loader_of(Fails()), budget_s=10)
    assert "ValueError: image 17 is truncated" in str(caught.value)
    assert "test_tune.py" in str(caught.value)


@pytest.mark.alone
def test_a_loader_that_hangs_costs_its_time_and_no_more() -> None:
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match="nothing measured within"):
        tune(loader_of(Items(sleep_s=600)), budget_s=3)
    assert time.perf_counter() - begun < 9


@pytest.mark.alone
def test_the_budget_is_kept() -> None:
    begun = time.perf_counter()
    result = tune(loader_of(Items(sleep_s=0.05)), step_s=0.001, budget_s=4)
    assert time.perf_counter() - begun < 4 + 3
    assert measured(result.rows)
    assert "budget" in result.stopped or "budget" in str(result)


@pytest.mark.alone
def test_a_data_loader_is_restarted_with_its_own_attributes() -> None:
    def double(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(items + items)

    for given in (
        DataLoader(Items(sleep_s=0.01), 4, shuffle=True, collate_fn=double, drop_last=True),
        lambda: DataLoader(Items(sleep_s=0.01), batch_sampler=[[1, 2, 3, 4]] * 1000, collate_fn=double),
    ):
        result = tune(given, step_s=0.030, budget_s=5, max_workers=2)
        rows = [row for row in result.rows if isinstance(row, Measured)]
        assert rows[0].batch_s == pytest.approx(0.04, rel=0.2)
        assert rows[0].batch_bytes == 2 * 4 * 16 * 4
        assert result.chosen is not None and result.chosen.num_workers == 2, str(result)


def test_what_is_no_loader_is_reported_with_what_to_do() -> None:
    class Mine(DataLoader[torch.Tensor]):
        pass

    for given, says in (
        (3, "neither a function that makes a loader nor a DataLoader"),
        (Mine(Items()), "is or returns a Mine, which gpuwatch cannot start with other settings"),
        (lambda: [1, 2], "is or returns a list, which gpuwatch cannot start"),
        (lambda path, num_workers: None, "needs path"),
        (lambda num_workers: 5, "returned a int, not an iterable"),
        (lambda num_workers: [], "gave no batch"),
        (lambda pin_memory: [], "no num_workers"),
    ):
        with pytest.raises(ConfigError, match=says):
            tune(given, budget_s=30)


@pytest.mark.alone
def test_a_pass_shorter_than_what_is_made_ahead_is_timed_whole() -> None:
    result = tune(loader_of(Items(sleep_s=0.01, count=12)), step_s=0.005, budget_s=6, max_workers=2)
    two = next(row for row in measured(result.rows) if row.setting.num_workers == 2)
    assert not two.steady
    assert "whole passes were timed" in str(result)


PROGRAM = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index):
        time.sleep({sleep_s})
        return torch.zeros({floats})
def make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers):
    return DataLoader(Items(), 4, num_workers=num_workers, prefetch_factor=prefetch_factor,
                      persistent_workers=persistent_workers)
"""


def command(directory: Path, *options: str, sleep_s: float = 0.01, floats: int = 16) -> list[str]:
    (directory / "train.py").write_text(PROGRAM.format(sleep_s=sleep_s, floats=floats))
    return [sys.executable, "-m", "gpuwatch", "tune", "train:make_loader", *options]


@pytest.mark.alone
def test_a_small_dev_shm_is_never_filled(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    mount = ["-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if unshare is None or subprocess.run([unshare, *mount, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace may be made here: needs root")
    tuning = command(tmp_path, "--step-ms", "15", "--budget-s", "8", "--json", floats=256 * 1024)  # 4 MiB a batch
    done = subprocess.run([unshare, *mount, *tuning], capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(row["result"] != "failed" for row in rows)
    measured = [row for row in rows if row["result"] == "measured"]
    assert measured[0]["shared_bytes"] == 4 * 1024**2
    assert max(row["usage"]["shm_bytes"] for row in measured) <= 0.6 * 64 * 1024**2
    assert any(row["usage"]["shm_bytes"] >= 4 * 1024**2 for row in measured)
    left = [row for row in rows if row["result"] == "left_out" and row["limit"] == "shm"]
    for row in measured:
        setting = row["setting"]
        ahead = setting["num_workers"] * (setting["prefetch_factor"] or 0)
        assert (ahead + 1) * 4 <= 0.6 * 64 or not setting["num_workers"]
    assert left or json.loads(done.stdout)["feeds"]


def test_ctrl_c_prints_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    tuning = command(tmp_path, "--step-ms", "1", sleep_s=0.02)
    process = subprocess.Popen(tuning, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def trial() -> list[int] | None:
        found = descendants(process.pid)
        return found if len(found) > 1 else None

    assert process.stderr is not None
    assert "num_workers=0: a batch every" in process.stderr.readline()
    children = wait_for("the next trial has a worker", trial, 20, 0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "batch every" in out and "interrupted" in out
    assert not any(lives(pid) for pid in children)


def test_the_step_of_a_run_is_its_transfer_and_compute(tmp_path: Path) -> None:
    none = [None] * 3
    answers = {
        "/api/v1/runs": Runs([Run("node-1", 0, "resnet50-a", "running", 0.0, 0.0, 0.0)]),
        "/api/v1/runs/node-1/steps": LastSteps(
            [1.0, 2.0, 3.0], [9.0] * 3, [0.01] * 3, [0.03, 0.05, 0.04], none, none, none, none, none, [0] * 3
        ),
    }

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(answers[self.path.partition("?")[0]]))

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert step_of_run(url, "resnet50-a") == pytest.approx(0.05)
            with pytest.raises(ConfigError, match=r"has no run 'other'; its runs: resnet50-a"):
                step_of_run(url, "other")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ConfigError, match="does not answer: start `gpuwatch up`, give --agent or --step-ms"):
        step_of_run(url, "resnet50-a")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "no module 'train'"),
        ("def make_loader(num_workers): raise OSError('no disk')", "OSError: no disk"),
    ],
)
def test_wrong_use_is_reported_and_ends_with_2(tmp_path: Path, code: str | None, says: str) -> None:
    tuning = command(tmp_path, "--budget-s", "30")
    if code is None:
        (tmp_path / "train.py").unlink()
    else:
        (tmp_path / "train.py").write_text(code)
    done = subprocess.run(tuning, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and "Traceback" not in done.stderr


HUNGRY = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    held = None

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if self.held is None:
            self.held = bytearray(b"x") * (100 << 20)  # what every worker keeps for itself
        time.sleep(0.02)
        return torch.zeros(16)

def make_loader(num_workers):
    return DataLoader(Items(), 4, num_workers=num_workers)
"""


def test_the_jobs_memory_limit_is_heeded_and_none_is_killed_for_it(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    command = [sys.executable, "-m", "gpuwatch", "tune", "hungry.py:make_loader", "--step-ms", "4", "--json"]
    with memory_limit(1500) as within:
        done = subprocess.run([*within, *command], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["facts"]["memory_available_bytes"] <= 1500 << 20
    assert not [row for row in result["rows"] if row["result"] == "failed"]
    left = next(row for row in result["rows"] if row["result"] == "left_out")
    assert left["limit"] == "memory" and "of memory" in left["text"]
    assert (
        max(row["setting"]["num_workers"] for row in result["rows"] if row["result"] == "measured") * 100 <= 0.6 * 1500
    )
