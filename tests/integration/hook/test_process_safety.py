"""The hook in processes that end, fork and multiply in unusual ways. test_hook_process.py has the usual ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwatch import wire
from gpuwatch.wire.sockets import ZmqReceiver
from tests.integration.agent_process import Agent

TRAIN = """
import os, signal, sys, time, gpuwatch
import gpuwatch.hook.publisher, gpuwatch.wire.sockets
gpuwatch.hook.publisher._CLOSE_S, gpuwatch.wire.sockets._LINGER_MS = 30.0, 5_000  # on a busy machine
w = gpuwatch.Watch(quiet=True)
for batch in w.steps(range(100_000)):
    time.sleep(0.01)
    if batch == 20: print("going", flush=True)
"""


@contextmanager
def script(tmp_path: Path, source: str, endpoint: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run a training script; it is ended with the `with`."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(source))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUWATCH_")}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        env={**clean, "GPUWATCH_ENDPOINT": endpoint, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str], expect: int = 0) -> tuple[str, str]:
    """Wait for the end; return what was printed on stdout and stderr."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == expect, err
    return out, err


def going(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"


@contextmanager
def receiver(tmp_path: Path) -> Iterator[tuple[ZmqReceiver, str]]:
    where = f"ipc://{tmp_path}/hook.sock"
    listening = ZmqReceiver([where])
    try:
        yield listening, where
    finally:
        listening.close()


def received(listening: ZmqReceiver) -> list[wire.Message]:
    messages: list[wire.Message] = []
    quiet = 0
    while quiet < 3:  # also where ZeroMQ's own thread gets no core for a while
        list(listening.connections())  # else `receive` returns at once from the first one on
        frames = listening.receive(500)
        messages += [wire.decode(frame) for frame, _ in frames]
        quiet = 0 if frames else quiet + 1
    return messages


# Signals --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as started:
        yield started


ENDS: dict[str, tuple[str, int, str]] = {
    "SIGTERM, default action": ("", -signal.SIGTERM, "lost"),
    "SIGTERM, a handler that exits": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))", 9, "ended"),
    "SIGTERM, a handler that raises": (
        "def stop(*_): raise InterruptedError\nsignal.signal(signal.SIGTERM, stop)",
        1,
        "ended",
    ),
    "os._exit": ("signal.signal(signal.SIGTERM, lambda *_: os._exit(4))", 4, "lost"),
}


@pytest.mark.parametrize("how", ENDS)
def test_who_says_good_bye_has_ended_and_who_cannot_is_lost(tmp_path: Path, agent: Agent, how: str) -> None:
    """gpuwatch installs no signal handler: what a signal does is the user's."""
    before, returncode, status = ENDS[how]
    name = f"signal-{list(ENDS).index(how)}"
    head, loop = TRAIN.split("for batch", 1)
    source = f"{head}{before}\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\nfor batch{loop}"
    with script(tmp_path, source, agent.endpoint, GPUWATCH_RUN=name) as process:
        going(process)
        agent.wait_run(name, status="running")
        process.send_signal(signal.SIGTERM)
        _, err = finished(process, returncode)
    assert agent.wait_run(name, status=status)["steps"] >= 1
    assert "gpuwatch" not in err.replace(str(tmp_path), "")


# The end of the interpreter -------------------------------------------------------------------------------------------


def test_a_watch_that_is_open_at_the_end_while_other_threads_train_says_good_bye_and_no_more(tmp_path: Path) -> None:
    source = """
        import atexit, threading, time, gpuwatch
        late = gpuwatch.Watch(quiet=True)
        atexit.register(lambda: late.report())        # runs before gpuwatch's own, registered earlier
        def train(watch):
            for batch in watch.steps(range(10**9)): time.sleep(0.0005)
        watches = [late, gpuwatch.Watch(quiet=True)]
        for watch in watches:
            threading.Thread(target=train, args=(watch,), daemon=True).start()
        keep = iter(gpuwatch.Watch(quiet=True).steps(range(5)))   # an iterator that lives until modules are torn down
        next(keep)
        time.sleep(4)
    """
    with receiver(tmp_path) as (listening, where):
        with script(tmp_path, source, where) as process:
            out, err = finished(process)
        messages = received(listening)
    assert (out, err) == ("", "")
    byes = [message for message in messages if isinstance(message, wire.Bye)]
    assert len({bye.run for bye in byes}) == len(byes) == 3
    assert all(sum(b.totals.states_ns.values()) == b.totals.watermark_ns - b.totals.start_ns for b in byes)


def test_a_subinterpreter_comes_and_goes(tmp_path: Path) -> None:
    """Extension modules may refuse to be loaded there; the main interpreter's run goes on either way."""
    source = """
        import time, gpuwatch
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        w = gpuwatch.Watch(quiet=True)
        for batch in w.steps(range(40)):
            time.sleep(0.01)
            if batch == 20:
                made = interpreters.create()
                try: interpreters.run_string(made, "import gpuwatch\\nfor _ in gpuwatch.watch(range(3)): pass")
                except Exception: pass
                interpreters.destroy(made)
        w.close()
        print(w.report().steps)
    """
    pytest.importorskip("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
    with script(tmp_path, source, f"ipc://{tmp_path}/no-agent.sock") as process:
        out, err = finished(process)
    assert out == "40\n" and "Traceback" not in err


# Notebooks ------------------------------------------------------------------------------------------------------------

CELLS = {
    "watch(loader)": "for batch in gpuwatch.watch(batches()): time.sleep(0.01)\n",
    "with Watch()": "with gpuwatch.Watch() as w:\n    for batch in w.steps(batches()): time.sleep(0.01)\n",
    "Watch() left open": "w = gpuwatch.Watch()\nfor batch in w.steps(batches()): time.sleep(0.01)\n",
}
_NOTEBOOK = """
    import contextlib, io, json, threading, time, gpuwatch
    def batches():
        for index in range(10):
            time.sleep(0.01)
            yield index
    def run(cell):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            {execute}
        return printed.getvalue()
    printed = [run({cell!r}), run({cell!r})]
    alive = [t.name for t in threading.enumerate()].count("gpuwatch")
    from gpuwatch.hook.watch import open_watches
    print(json.dumps([printed, alive, len(open_watches)]))
"""


@pytest.mark.parametrize("shell", ["exec", "IPython"])
@pytest.mark.parametrize("style", CELLS)
def test_a_cell_that_is_run_again(tmp_path: Path, style: str, shell: str) -> None:
    """A closed Watch leaves nothing behind; one that a cell leaves open is open until the end, as a variable is."""
    if shell == "exec":
        execute = "exec(cell, globals())"
    else:
        pytest.importorskip("IPython")
        execute = "SHELL.run_cell(cell).raise_error()"
    source = textwrap.dedent(_NOTEBOOK).format(execute=execute, cell=CELLS[style])
    if shell == "IPython":
        made = "from IPython.core.interactiveshell import InteractiveShell\nSHELL = InteractiveShell.instance(user_ns=globals())\n"
        source = source.replace("def run(cell)", made + "def run(cell)", 1)
    environ = {"IPYTHONDIR": str(tmp_path), "PYTHONWARNINGS": "default"}
    with script(tmp_path, source, f"ipc://{tmp_path}/no-agent.sock", **environ) as process:
        out, _ = finished(process)
    output, threads, still_open = json.loads(out.splitlines()[-1])
    assert output[0].count("gpuwatch ·") == 1 and "10 steps" in output[0]
    if style == "with Watch()":
        assert output[1].count("gpuwatch ·") == 1 and "10 steps" in output[1]
        assert (threads, still_open) == (0, 0)
    elif style == "watch(loader)":  # both cells are one run; its end has the second verdict
        assert output[1] == "" and (threads, still_open) == (1, 1)
    else:
        assert "10 steps" in output[1] and (threads, still_open) == (2, 2)


# Children -------------------------------------------------------------------------------------------------------------


def test_children_that_do_not_train_are_no_runs(tmp_path: Path) -> None:
    """Spawned and forkserver children import the script again, and gpuwatch with it; some open a Watch by that."""
    source = """
        import multiprocessing, time, gpuwatch
        w = gpuwatch.Watch(quiet=True)      # a child's import opens one too
        def work(number):
            with gpuwatch.Watch(quiet=True).phase("checkpoint"):
                time.sleep(0.7)
            return number
        if __name__ == "__main__":
            for batch in w.steps(range(2)):
                for method in ("spawn", "forkserver"):
                    with multiprocessing.get_context(method).Pool(2) as pool:
                        assert pool.map(work, [1, 2]) == [1, 2]
            w.close()
    """
    with receiver(tmp_path) as (listening, where):
        with script(tmp_path, source, where) as process:
            out, err = finished(process)
            parent = process.pid
        messages = received(listening)
    assert (out, err) == ("", "")
    hellos = [message for message in messages if isinstance(message, wire.Hello)]
    assert {hello.pid for hello in hellos} == {parent}
    assert len({message.origin.sender for message in messages}) == 1


def test_a_forked_child_that_trains_is_a_run_of_its_own_also_under_a_declared_id(tmp_path: Path) -> None:
    """Twice deep: a child of a child trains too. None of them may speak as its parent's rank."""
    source = """
        import os, time, gpuwatch
        def train(w):
            for batch in w.steps(range(30)): time.sleep(0.03)
        def child(depth):
            pid = os.fork()
            if pid == 0:
                if depth: child(depth - 1)
                with gpuwatch.Watch(quiet=True) as w: train(w)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with gpuwatch.Watch(quiet=True) as w:
            train(w)
            child(1)
    """
    with receiver(tmp_path) as (listening, where):
        with script(tmp_path, source, where, GPUWATCH_RUN="sweep") as process:
            finished(process)
            parent = process.pid
        messages = received(listening)
    byes = [message for message in messages if isinstance(message, wire.Bye)]
    pids = {m.run: m.pid for m in messages if isinstance(m, wire.Hello)}
    assert len(byes) == 3 and {bye.totals.steps for bye in byes} == {30}
    assert pids == {"sweep": parent, **{f"sweep-fork{pid}": pid for pid in pids.values() if pid != parent}}
    assert len(pids) == 3


def test_twenty_forks_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    """The children are bare `os.fork` as a launcher of evaluations makes them; the run goes on through them."""
    source = """
        import gc, json, os, pathlib, statistics, sys, threading, time, gpuwatch
        w = gpuwatch.Watch(quiet=True)
        def resident_kib():
            gc.collect()
            return int(pathlib.Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0])
        def fork():
            begin = time.perf_counter()
            child = os.fork()
            if child == 0: os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            return time.perf_counter() - begin
        bare = [fork() for _ in range(20)]
        inside = []
        for batch in w.steps(range(40)):
            time.sleep(0.02)
            if batch == 10: before = resident_kib()
            if batch % 2: inside.append(fork())
        growth = resident_kib() - before
        w.close()
        usual = [statistics.median(each) for each in (bare, inside)]  # some may have to wait for a core
        print(json.dumps([*usual, growth, w.report().steps, threading.active_count()]))
    """
    with receiver(tmp_path) as (listening, where):
        with script(tmp_path, source, where) as process:
            out, _ = finished(process)
        messages: list[Any] = received(listening)
    bare_s, inside_s, growth_kib, steps, threads = json.loads(out)
    assert (steps, threads) == (40, 1)
    assert inside_s < 0.05 + 5 * bare_s
    assert growth_kib < 4096
    assert len({message.origin.sender for message in messages}) == 1 and isinstance(messages[-1], wire.Bye)


@pytest.mark.alone  # a connection is waited for in 0.1 s, and a goodbye is sent within 0.3 s or never
def test_an_agent_sees_the_good_bye_of_a_short_run(tmp_path: Path, agent: Agent) -> None:
    source = "import gpuwatch\nwith gpuwatch.Watch(quiet=True) as w:\n    for _ in w.steps(range(3)): pass\n"
    with script(tmp_path, source, agent.endpoint, GPUWATCH_RUN="short") as process:
        finished(process)
    assert agent.wait_run("short", 10, status="ended")["steps"] == 3
