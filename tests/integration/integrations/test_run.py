"""`gpuwatch run`: a script that was not changed, its ledger as it reaches an agent, and all else as without."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch.wire import Bye, Hello, Totals, decode
from gpuwatch.wire.sockets import ZmqReceiver
from tests.integration.integrations import workload as w

SCRIPT = Path(__file__).with_name("script.py")
RUN = [sys.executable, "-m", "gpuwatch", "run", "--"]


@dataclass(frozen=True)
class Done:
    """How a run ended and what it reported: the totals of each process that closed its run."""

    code: int
    out: str
    err: str
    totals: list[Totals]
    hellos: list[Hello]


def run(directory: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Done:
    """Run `gpuwatch run -- command` with a listener in the agent's place."""
    endpoint = f"ipc://{directory}/hook.sock"
    receiver, messages, over = ZmqReceiver([endpoint]), [], threading.Event()

    def listen() -> None:
        while not over.is_set():
            list(receiver.connections())  # else `receive` returns at once from the first one on
            messages.extend(decode(frame) for frame, _ in receiver.receive(50))
        end_s = time.monotonic() + 10  # for what ZeroMQ's thread, which may have had no core, has not read yet
        while True:
            list(receiver.connections())
            frames = receiver.receive(300)
            messages.extend(decode(frame) for frame, _ in frames)
            senders, ended = ({m.origin.sender for m in messages if isinstance(m, kind)} for kind in (Hello, Bye))
            if not frames and (senders <= ended or time.monotonic() > end_s):
                return

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        done = subprocess.run(
            [*RUN, *command],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **(environment or {}), "GPUWATCH_ENDPOINT": endpoint},
        )
    finally:
        over.set()
        thread.join()
        receiver.close()
    totals = [message.totals for message in messages if isinstance(message, Bye)]
    hellos = [message for message in messages if isinstance(message, Hello)]
    return Done(done.returncode, done.stdout, done.stderr, totals, hellos)


@pytest.mark.alone
@pytest.mark.parametrize("loop", ["plain", "watched", *w.INTEGRATIONS])
def test_an_unchanged_script_has_the_ledger_of_a_watched_one(loop: str, tmp_path: Path) -> None:
    w.need(loop if loop in w.INTEGRATIONS else "torch")
    done = run(tmp_path, [sys.executable, str(SCRIPT), loop, str(tmp_path)])
    assert done.code == 0 and "not watched" not in done.err, done.err
    truth = json.loads(next(line for line in done.out.splitlines() if line.startswith('{"input_wait"')))
    (totals,) = done.totals
    states = {state: ns / 1e9 for state, ns in totals.states_ns.items()}
    wall_s = truth.pop("wall")
    print(loop, w.table(states, w.Truth(truth), wall_s))
    for state in ("input_wait", "eval", "checkpoint"):
        # Imports are in this wall clock: the bound is a share of what was injected.
        assert states.get(state, 0.0) == pytest.approx(truth[state], abs=0.03 * sum(truth.values())), (states, truth)
    assert totals.steps == w.STEPS and totals.samples == w.SAMPLES
    assert sum(states.values()) == pytest.approx((totals.watermark_ns - totals.start_ns) / 1e9, rel=0.002)
    assert done.err.count("gpuwatch · script.py") >= 1


def test_loader_workers_report_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, [sys.executable, str(SCRIPT), "workers", str(tmp_path)])
    assert done.code == 0, done.err
    (totals,) = done.totals
    assert totals.steps == 4
    assert len({hello.origin.sender for hello in done.hellos}) == 1


def test_torchrun_workers_are_watched_with_their_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(tmp_path, [*torchrun, str(SCRIPT), "plain", str(tmp_path)])
    assert done.code == 0, done.err
    assert [totals.steps for totals in done.totals] == [w.STEPS, w.STEPS]
    assert {hello.rank for hello in done.hellos} == {0, 1}


THREAD = """
import os, threading, torch
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=2)
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
for work in (lambda: list(loader), train):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
os._exit(3)
"""


def test_a_thread_that_makes_an_optimizer_is_watched_and_its_end_is_the_runs(tmp_path: Path) -> None:
    """As in Ray's workers, which end without their atexit functions. A thread that only reads trains nothing."""
    done = run(tmp_path, [sys.executable, "-c", THREAD])
    (totals,) = done.totals
    assert (done.code, totals.steps, totals.samples) == (3, 64, 128), done.err
    assert "64 steps" in done.err


ELSEWHERE = """
import multiprocessing, threading, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
def train(loads):
    if loads:
        for _ in range(2):
            for batch in torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2):
                step(batch)
    else:
        for _ in range(65):
            time.sleep(0.003)
            step(torch.ones(2, 4))
"""
IN_A_THREAD = (
    ELSEWHERE
    + """
thread = threading.Thread(target=train, args=(True,))
thread.start()
thread.join()
"""
)
IN_A_FORK = (
    ELSEWHERE
    + """
process = multiprocessing.get_context("fork").Process(target=train, args=(False,))
process.start()
process.join()
raise SystemExit(process.exitcode + 5)
"""
)


FED = (
    ELSEWHERE
    + """
import queue
held = queue.Queue(1)
def take(count):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        step(held.get())
def taking():
    for _ in range(2):
        thread = threading.Thread(target=take, args=(32,))
        thread.start()
        thread.join()
trainers = threading.Thread(target=taking)
trainers.start()
for batch in torch.utils.data.DataLoader(torch.ones(128, 4), batch_size=2):
    time.sleep(0.005)
    held.put(batch)
trainers.join()
"""
)


def test_a_run_does_not_end_with_a_thread_that_the_main_ones_loop_feeds(tmp_path: Path) -> None:
    """The run was closed when the first thread that made a step ended.

    That took a second, and half of the steps became another run.
    """
    done = run(tmp_path, [sys.executable, "-c", FED])
    (totals,) = done.totals
    assert (done.code, totals.steps, totals.samples) == (0, 64, 128), done.err


def test_a_thread_that_uses_another_ones_optimizer_is_watched(tmp_path: Path) -> None:
    """As in a program with windows: the main thread has made model and optimizer.

    What trains is known from the optimizer's first step on.
    """
    done = run(tmp_path, [sys.executable, "-c", IN_A_THREAD])
    (totals,) = done.totals
    assert done.code == 0 and 31 + 32 - 1 <= totals.steps <= 31 + 32, done.err
    assert totals.samples == 64 and "no training step was seen" not in done.err


def test_a_training_in_a_forked_process_has_an_end_and_a_verdict(tmp_path: Path) -> None:
    """multiprocessing ends such a process without atexit handlers: nothing was printed, and the agent lost the run."""
    done = run(tmp_path, [sys.executable, "-c", IN_A_FORK])
    (totals,) = done.totals
    assert (done.code, totals.steps) == (5, 64), done.err
    assert done.err.count("64 steps of") == 1 and "no training step was seen" not in done.err


OWN_LOADERS = """
import json, time, torch
waited = 0.0
def wait():
    global waited
    begin = time.perf_counter()
    time.sleep(0.02)
    waited += time.perf_counter() - begin
class Augmented(torch.utils.data.DataLoader):
    def __iter__(self):
        for (batch,) in super().__iter__():
            wait()
            yield batch + 1
class Augmented(Augmented):
    def __iter__(self):
        yield from super().__iter__()
class Repeated(torch.utils.data.DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()
    def __iter__(self):
        for _ in range(len(self)):
            wait()
            yield next(self.iterator)[0]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for loader in (Augmented, Repeated):
    for batch in loader(torch.utils.data.TensorDataset(torch.ones(60, 4)), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.01)
print(json.dumps(waited))
"""


def test_what_a_loader_s_own_class_does_to_a_batch_is_a_wait_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, [sys.executable, "-c", OWN_LOADERS])
    assert done.code == 0, done.err
    (totals,) = done.totals
    assert totals.steps == 60, done.err
    spent_s = {state: ns / 1e9 for state, ns in totals.states_ns.items()}
    waited_s = json.loads(done.out)
    assert waited_s <= spent_s["input_wait"] <= waited_s + 0.4, (spent_s, waited_s)
    assert spent_s["compute"] >= 0.6, spent_s


SUBCLASSES = """
import torch
class Base(torch.utils.data.DataLoader):
    kinds = {}
    def __init_subclass__(cls, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        Base.kinds[kind] = cls.__name__
    def __iter__(self):
        for (batch,) in super().__iter__():
            yield batch
class Images(Base, kind="images"):
    def __iter__(self):
        yield from super().__iter__()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in Images(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
print(Base.kinds)
"""


def test_a_loaders_class_keeps_what_it_does_with_its_subclasses(tmp_path: Path) -> None:
    """A class with an `__iter__` and an `__init_subclass__` lost the latter: "takes no keyword arguments"."""
    done = run(tmp_path, [sys.executable, "-c", SUBCLASSES])
    assert (done.code, done.out) == (0, "{'images': 'Images'}\n"), done.err
    (totals,) = done.totals
    assert totals.steps == 32, done.err


OWN_TRAINERS = """
import itertools, json, sys, time, torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
class Slow(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items, self.spent = items, 0.0
    def __len__(self):
        return self.items
    def __getitem__(self, index):
        begin = time.perf_counter()
        time.sleep(0.02)
        self.spent += time.perf_counter() - begin
        return torch.ones(4)
class Ahead:
    def __init__(self, dataset, workers):
        self.loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=workers)
        self.batches = None
    def __iter__(self):
        self.batches = iter(self.loader)
        for _ in range(len(self.loader)):
            yield next(self.batches)
        self.batches = iter(self.loader)
class OwnLoader:
    def __init__(self, dataset, workers):
        self.parts = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=workers)
    def __iter__(self):
        made = (_MultiProcessingDataLoaderIter if self.parts.num_workers else _SingleProcessDataLoaderIter)(self.parts)
        for batch in made:
            yield batch.float()
kind, workers = {"ahead": Ahead, "own": OwnLoader}[sys.argv[1]], int(sys.argv[2])
torch.manual_seed(0)
weight = torch.randn(4, requires_grad=True)
training = Slow(20)
loader, validation = kind(training, workers), kind(Slow(8), workers)
spent = {"eval": 0.0, "compute": 0.0}
for epoch in range(2):
    for batch in loader:
        begin = time.perf_counter()
        (batch @ weight).square().mean().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        time.sleep(0.03)
        spent["compute"] += time.perf_counter() - begin
    begin = time.perf_counter()
    for batch in validation:
        with torch.no_grad():
            (batch @ weight).square().mean()
        time.sleep(0.01)
    spent["eval"] += time.perf_counter() - begin
print(json.dumps({**spent, "input_wait": training.spent, "weight": weight.tolist()}))
"""


@pytest.fixture(scope="module")
def unwatched() -> dict[str, Any]:
    """What such a program prints without gpuwatch; with either loader it trains on the same batches."""
    done = subprocess.run([sys.executable, "-c", OWN_TRAINERS, "own", "0"], capture_output=True, text=True, check=True)
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("kind", ["ahead", "own"])
def test_a_trainer_with_a_loader_and_an_optimizer_of_its_own_is_watched(
    kind: str, workers: str, unwatched: dict[str, Any], tmp_path: Path
) -> None:
    """It acts like Keras, which makes the next pass's iterator before it validates, or like fastai.

    The loader of fastai makes torch's iterators itself.
    """
    done = run(tmp_path, [sys.executable, "-c", OWN_TRAINERS, kind, workers])
    assert done.code == 0, done.err
    truth = json.loads(done.out)
    (totals,) = done.totals
    assert totals.steps == 20, done.err
    spent_s = {state: ns / 1e9 for state, ns in totals.states_ns.items()}
    assert spent_s["compute"] == pytest.approx(truth["compute"], abs=0.1), (spent_s, truth)
    assert 0.2 <= spent_s["eval"] <= truth["eval"] + 0.1, (spent_s, truth)
    if workers == "0":  # the start of workers is a wait before it is known what the pass is for
        assert spent_s["eval"] == pytest.approx(truth["eval"], abs=0.1), (spent_s, truth)
        assert truth["input_wait"] <= spent_s["input_wait"] <= truth["input_wait"] + 0.3, (spent_s, truth)
    assert truth["weight"] == unwatched["weight"]


SUBCLASS = """
import torch
from ignite.engine import Engine
class Trainer(Engine):
    def run(self):
        return super().run(data=loader, max_epochs=2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=2)
print(Trainer(lambda engine, batch: None).run().iteration)
"""


def test_an_ignite_engine_whose_run_takes_other_arguments_runs_as_without_gpuwatch(tmp_path: Path) -> None:
    """As MONAI's trainers."""
    pytest.importorskip("ignite")
    done = run(tmp_path, [sys.executable, "-c", SUBCLASS])
    (totals,) = done.totals
    assert (done.code, done.out.strip(), totals.steps) == (0, "64", 64), done.err


def test_exit_code_output_and_arguments_are_the_scripts(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); print('oops', file=sys.stderr); sys.exit(7)"
    done = run(tmp_path, [sys.executable, "-c", code, "--epochs", "3", "--", "-v"])
    assert (done.code, done.out) == (7, "['--epochs', '3', '--', '-v']\n")
    theirs, _, ours = done.err.partition("\n")
    assert theirs == "oops" and ours.startswith(
        "gpuwatch: no training step was seen in this process: the program has not imported torch."
    )
    assert ours.count("\n") == 1


INSTRUMENTED = "import sys; print('Finder' in [type(each).__name__ for each in sys.meta_path])"


def test_a_shell_scripts_python_is_watched_too(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/sh\n{sys.executable} -c "{INSTRUMENTED}"\n')
    script.chmod(0o755)
    assert run(tmp_path, [str(script)]).out == "True\n"


HELPER = """
import subprocess, sys
helper = [sys.executable, "-c", "import torch; print('2.x')"]
print(repr(subprocess.run(helper, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout))
"""


def test_a_helpers_output_that_the_program_reads_is_its_own(tmp_path: Path) -> None:
    """It was the version, and "gpuwatch: no training step was seen in this process"."""
    done = run(tmp_path, [sys.executable, "-c", HELPER])
    assert done.out == "'2.x\\n'\n" and done.err.count("no training step was seen") == 1, done.err


def test_python_that_a_shell_script_starts_says_why_there_is_no_verdict(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/sh\n{sys.executable} -c "import torch"\ntrue\n')
    script.chmod(0o755)
    assert run(tmp_path, [str(script)]).err.count("no training step was seen") == 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    (tmp_path / "train.py").write_text("import torch")
    assert run(tmp_path, [*torchrun, str(tmp_path / "train.py")]).err.count("no training step was seen") == 1


PARENT = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def test_a_file_that_a_shell_script_writes_by_a_descriptor_is_its_own(tmp_path: Path) -> None:
    """`exec 3>results.txt` took the place of the notes of `gpuwatch run`: pids were appended to the file."""
    script, train = tmp_path / "job.sh", shlex.join([sys.executable, "-c", PARENT, ELSEWHERE + "train(False)"])
    more = " ".join(f"{number}>&3" for number in range(4, 10))
    script.write_text(f"#!/bin/sh\nexec 3>'{tmp_path}/results.txt' {more}\n{train}\necho done >&3\n")
    script.chmod(0o755)
    done = run(tmp_path, [str(script)])
    assert done.code == 0 and "64 steps" in done.err and "no training step was seen" not in done.err, done.err
    assert (tmp_path / "results.txt").read_text() == "done\n"


@pytest.mark.parametrize("then", ["pass", ELSEWHERE + "train(False)"])
def test_a_pipe_in_the_place_of_the_notes_is_neither_read_nor_written(then: str, tmp_path: Path) -> None:
    """With `exec 3>&1` in a shell script, each Python in it waited forever at its end, or wrote pids to its output."""
    take = "import os; os.dup2(1, int(os.environ['GPUWATCH_AUTO_NOTES'].rpartition('/')[2]))"
    done = run(tmp_path, [sys.executable, "-c", f"{take}\n{then}"])
    assert (done.code, done.out) == (0, ""), done.err


def test_the_notes_are_kept_in_memory_wherever_temporary_files_are(tmp_path: Path) -> None:
    """With TMPDIR on NFS each launcher printed "no training step was seen": a deleted file has a link there."""
    code = "import os; print(os.readlink(os.environ['GPUWATCH_AUTO_NOTES']))"
    assert run(tmp_path, [sys.executable, "-c", code], {"TMPDIR": str(tmp_path)}).out.startswith("/dev/shm/")


def test_signals_reach_the_script_itself(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*RUN, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_a_sitecustomize_that_was_there_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.CUSTOMIZED = __name__, __file__\n")
    code = "import sitecustomize, os, sys; print(CUSTOMIZED, sitecustomize.__file__, 'startup' in str(sys.path))"
    done = run(tmp_path, [sys.executable, "-c", code], {"PYTHONPATH": str(tmp_path)})
    path = str(tmp_path / "sitecustomize.py")
    assert done.out == f"{('sitecustomize', path)} {path} False\n", done.err


def test_a_script_that_is_no_program_is_run_by_this_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    done = run(tmp_path, [str(tmp_path / "train.py"), "--epochs", "3"])
    assert done.out == f"{sys.executable} ['--epochs', '3']\n", done.err


@pytest.mark.parametrize(("first", "name"), [("", "./train.py"), ("", "train.py"), ("#!/bin/true\n", "train.py")])
def test_a_script_with_the_mode_of_a_program_is_run_too(first: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{first}import sys; print(sys.executable, sys.argv)")
    (tmp_path / "train.py").chmod(0o755)  # as all files are on some file systems
    done = subprocess.run([*RUN, name], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{sys.executable} ['{name}']\n", done.stderr


def test_a_script_that_names_its_interpreter_is_run_by_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("#!/bin/echo by")
    (tmp_path / "train.py").chmod(0o755)
    assert (
        subprocess.run([*RUN, "./train.py"], cwd=tmp_path, capture_output=True, text=True).stdout == "by ./train.py\n"
    )


@pytest.mark.parametrize("before", [["--"], [], ["--trace"], ["--trace", "--"]])
def test_options_of_the_program_are_its_own_with_dashes_before_it_and_without(before: list[str]) -> None:
    program = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--help", "--trace", "-v", "--", "x"]
    done = subprocess.run([*RUN[:-1], *before, *program], capture_output=True, text=True)
    assert done.stdout == "['--help', '--trace', '-v', '--', 'x']\n", done.stderr


@pytest.mark.parametrize("value", ["1", "yes", "0", "False", "no"])
def test_disabled_changes_nothing(value: str, tmp_path: Path) -> None:
    done = run(tmp_path, [sys.executable, "-c", INSTRUMENTED], {"GPUWATCH_DISABLE": value})
    assert done.out == f"{value not in ('1', 'yes')}\n"


def test_an_environment_without_gpuwatch_is_one_message(tmp_path: Path) -> None:
    """docs/guides/integrations.md: "one message reports it". It was one for each module of torch's.

    transformers imports torch while its own module is imported.
    """
    pytest.importorskip("transformers")
    code = "import sys; sys.modules['gpuwatch'] = None; from transformers import Trainer; import torch.distributed"
    done = run(tmp_path, [sys.executable, "-c", code])
    assert done.err.count("is not watched") == 1, done.err
    assert "no training step was seen" not in done.err, "for another reason than the one it gives"


OLD = """
import collections.abc, contextlib, importlib.machinery, importlib.util, runpy, sys, types, typing
collections.abc.Sequence = types.ModuleType = type("Any", (), {})  # not to be subscripted, and no `X | None`
runpy.run_path(sys.argv[1])
print("went on")
"""


def test_an_older_python_starts_too() -> None:
    """Where annotations cannot be evaluated, as in a system's Python 3.8: it printed "Error in sitecustomize"."""
    file = Path(gpuwatch.__file__).with_name("startup") / "sitecustomize.py"
    done = subprocess.run([sys.executable, "-c", OLD, str(file)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("went on\n", "")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no-such-program"], 127, "no-such-program: no such program"),
        (["/dev/null"], 126, "/dev/null: not executable"),
        (["/tmp"], 126, "/tmp: is a directory"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_run_is_refused_as_a_shell_does(command: list[str], code: int, message: str) -> None:
    done = subprocess.run([*RUN, *command], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr
