"""`gpuwatch trace`, and `gpuwatch stacks` without py-spy, on a real training: by requests to the process itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.errors import GpuwatchError
from gpuwatch.hook.requests import ask
from gpuwatch.host.proc import own_number
from tests.integration.agent_process import Agent
from tests.servers import wait_for

PROGRAM = """
import sys, threading, time, torch
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(400_000, 16))

def train_step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(PAUSE)

def prefetch():
    while True:
        time.sleep(0.01)

threading.Thread(target=prefetch, daemon=True, name="prefetch").start()
threading.main_thread().name = "trainer"
end = time.monotonic() + 600
kind = sys.argv[1]
if kind == "loader":
    for (batch,) in gpuwatch.watch(DataLoader(data, batch_size=4)):  # 100,000 batches
        train_step(batch)
        if time.monotonic() > end: break
elif kind == "step":
    w = gpuwatch.Watch()
    while time.monotonic() < end:
        with w.step():
            train_step(torch.randn(4, 16))
else:
    while time.monotonic() < end:
        train_step(torch.randn(4, 16))
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no core for five seconds answers all the same."""
    monkeypatch.setattr("gpuwatch.hook.requests._TAKEN_S", 60.0)


@contextmanager
def training(
    directory: Path, kind: str, *options: str, pause_s: float = 0.002, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    (directory / "train.py").write_text(PROGRAM.replace("PAUSE", str(pause_s)))
    environment = {
        **os.environ,
        "GPUWATCH_ENDPOINT": f"ipc://{directory}/hook.sock",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-m", "gpuwatch", "run", *options, "--", sys.executable, "train.py", kind]
    with (directory / "train.err").open("wb") as errors:
        process = subprocess.Popen(command, cwd=directory, env=environment, stderr=errors)
    try:
        yield process
    except BaseException:
        print("the training's status:", process.poll(), (directory / "train.err").read_text()[-2000:])
        raise
    finally:
        process.kill()
        process.wait(10)


def gpuwatch(*arguments: object, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwatch", *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def when_it_answers(pid: int, **wanted: Any) -> bytes:
    """Ask until its hook runs."""

    def answer() -> bytes | None:
        try:
            return ask(pid, **wanted)
        except GpuwatchError as error:
            assert "does not answer" in str(error) or "cannot be reached" in str(error), error
            return None

    found = wait_for("it answers", answer, 90, 0.1)
    assert found is not None
    return found


def ask_for_steps(process: subprocess.Popen[bytes]) -> None:
    for steps in (7, 20):
        events = json.loads(when_it_answers(process.pid, steps=steps))["traceEvents"]
        made = [each for each in events if str(each.get("name", "")).startswith("Optimizer.step#SGD")]
        assert len({each["ts"] for each in made}) == steps
        assert any(each.get("name") == "aten::linear" for each in events)
    assert process.poll() is None


@pytest.mark.parametrize("kind", ["loader", "step", "bare"])
def test_a_trace_has_the_steps_that_were_asked_for(tmp_path: Path, kind: str) -> None:
    """Of a program that does not pause."""
    with training(tmp_path, kind, "--trace", pause_s=0.0) as process:
        ask_for_steps(process)


PROFILED = """
import json, os, sys, threading, time, torch
import gpuwatch
from gpuwatch.hook.requests import ask

kind, found = sys.argv[1], {}

def follow():
    try:
        events = json.loads(ask(os.getpid(), steps=200))["traceEvents"]
        found["trace"] = len({each["ts"] for each in events if str(each.get("name", "")).startswith("Optimizer.step#SGD")})
    except Exception as error:
        found["trace"] = str(error)

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
w = gpuwatch.Watch(trace=True, quiet=True)
schedule = torch.profiler.schedule(wait=0, warmup=100, active=30, repeat=1) if kind == "warms up" else None
profile = torch.profiler.profile(schedule=schedule)
asking, begun = threading.Thread(target=follow), False
for step in w.steps(range(100_000)):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    tracing = torch.autograd._profiler_enabled()
    if step == 10:
        asking.start()
    if not begun and (tracing if kind == "begins" else step == 9):
        profile.start()
        begun, began = True, step
    elif begun:
        profile.step()
        if step == began + (130 if kind == "warms up" else 400):
            profile.stop()
            break
    time.sleep(0.01 if kind != "begins" else 0.002)
asking.join(90)
found["own"] = sum(each.count for each in profile.key_averages() if each.key.startswith("Optimizer.step#SGD"))
print(json.dumps(found))
"""


@pytest.mark.parametrize(("kind", "own_steps"), [("runs", 400), ("begins", 400), ("warms up", 30)])
def test_the_program_s_own_profile_is_complete_whatever_is_asked_meanwhile(
    tmp_path: Path, kind: str, own_steps: int
) -> None:
    (tmp_path / "train.py").write_text(PROFILED)
    command = [sys.executable, "train.py", kind]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["own"] == own_steps, found
    if kind == "runs":
        assert "the program's own" in found["trace"], found
    else:
        assert 0 < found["trace"] < 200, "what was traced until then"


def test_by_the_run_s_name_and_only_where_it_is_allowed(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        with training(tmp_path, "loader", GPUWATCH_RUN="photos"):
            agent.wait_run("photos", 90, status="running", activity="step")
            refused = gpuwatch("trace", "photos", "--agent", agent.url, directory=tmp_path)
        assert refused.returncode == 1 and "gpuwatch run --trace" in refused.stderr, refused.stderr
        with training(tmp_path, "loader", GPUWATCH_RUN="paintings", GPUWATCH_TRACE="1"):
            agent.wait_run("paintings", 90, status="running", activity="step")
            done = gpuwatch("trace", "paintings", "--steps", 3, "--agent", agent.url, directory=tmp_path)
            assert done.returncode == 0, done.stderr
            file = tmp_path / "gpuwatch-trace-paintings-rank0.json"
            assert str(file.name) in done.stdout and "aten::linear" in file.read_text()
            before = file.read_bytes()
            again = gpuwatch("trace", "last", "--steps", 3, "--agent", agent.url, directory=tmp_path)
            assert "gpuwatch-trace-paintings-rank0-2.json" in again.stdout and file.read_bytes() == before, again
            for place in (tmp_path, tmp_path / "none" / "trace.json"):
                wrong = gpuwatch("trace", "last", "-o", place, "--agent", agent.url, directory=tmp_path)
                assert wrong.returncode == 2 and wrong.stderr.startswith(f"gpuwatch: --output {place}: "), wrong.stderr


def test_stacks_without_py_spy_are_the_process_s_own(tmp_path: Path) -> None:
    with training(tmp_path, "loader", pause_s=0.02) as process:
        when_it_answers(process.pid, seconds=0.1)
        program = (
            "import gpuwatch.hook.requests as requests, gpuwatch.tools.stacks.spy as spy; requests._TAKEN_S = 60.0; "
        )
        program += "spy.shutil.which = lambda *a, **k: None; from gpuwatch.cli import main; main()"
        command = [sys.executable, "-c", program, "stacks", "--pid", str(process.pid), "--seconds", "6"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("training  train.py:14 train_step: "), done.stdout
        graph = json.loads((tmp_path / f"gpuwatch-stacks-{process.pid}.speedscope.json").read_text())
        names = [each["name"] for each in graph["profiles"]]
        assert any('"prefetch"' in name for name in names) and any('"MainThread"' in name for name in names)
        assert all(
            len(each["samples"]) == each["endValue"] >= 20
            for each in graph["profiles"]
            if "gpuwatch" not in each["name"]
        )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A training that answers, for the tests that follow."""
    with training(tmp_path_factory.mktemp("traced"), "loader", "--trace") as process:
        when_it_answers(process.pid, seconds=0.1)
        yield process


def test_a_trace_of_a_program_that_pauses(traced: subprocess.Popen[bytes]) -> None:
    ask_for_steps(traced)


def test_those_who_ask_at_once_get_their_own_answers(traced: subprocess.Popen[bytes]) -> None:
    with ThreadPoolExecutor() as pool:
        asked = {steps: pool.submit(ask, traced.pid, steps=steps) for steps in (4, 8, 12)}
        sampled = pool.submit(ask, traced.pid, seconds=0.2)
        for steps, answer in asked.items():
            events = json.loads(answer.result(60))["traceEvents"]
            made = [each for each in events if str(each.get("name", "")).startswith("Optimizer.step#SGD")]
            assert len({each["ts"] for each in made}) == steps
        assert "speedscope" in json.loads(sampled.result(60))["$schema"]


def test_a_request_that_is_none_is_removed_and_ends_nothing(traced: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = Path(f"/tmp/gpuwatch-{os.getuid()}")
    request = folder / f"{own_number(traced.pid)}.request"
    for text in (b"", b"{", b'{"pid": 1, "steps": 1000000}', b"x" * 10_000):
        request.write_bytes(text)
        wait_for("it is taken", lambda: not request.exists(), 10, 0.05)
    os.mkfifo(request)
    assert traced.poll() is None
    wait_for("a pipe is removed or left", lambda: True, 1)
    request.unlink(missing_ok=True)
    target = tmp_path / "target"
    target.write_bytes(b'{"pid": 1, "seconds": 0.1}')
    request.symlink_to(target)
    assert json.loads(ask(traced.pid, seconds=0.1))["profiles"], "it goes on"
    assert target.exists()
