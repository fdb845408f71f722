"""The hook in real processes: how they begin, fork, fail and end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch import wire
from gpuwatch.wire.sockets import ZmqReceiver


def run(script: str, tmp_path: Path, expect: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a training script to its end."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUWATCH_")}
    clean["GPUWATCH_ENDPOINT"] = f"ipc://{tmp_path}/no-agent.sock"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == expect, done.stderr
    return done


def test_import_is_light(tmp_path: Path) -> None:
    """No torch, nothing of the agent's or the dashboard's."""
    done = run(
        """
        import sys
        import gpuwatch
        print(*sys.modules)
        """,
        tmp_path,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    heavy = {"torch", "numpy", "psutil", "prometheus_client", "pynvml", "starlette", "uvicorn", "typer", "rich", "yaml"}
    heavy |= {
        "sqlite3",
        "asyncio",
        "httpx",
        "streamlit",
        "plotly",
        "gpuwatch_agent",
        "gpuwatch_dashboards",
        "grafana_foundation_sdk",
    }
    assert loaded & heavy == set()


def test_a_script_with_one_line_more_prints_its_verdict_once_at_the_end(tmp_path: Path) -> None:
    done = run(
        """
        import pathlib, time, gpuwatch
        spent = {"wait": 0.0, "train": 0.0}
        def spend(what):
            begin = time.perf_counter()
            time.sleep(0.01)
            spent[what] += time.perf_counter() - begin
        def batches():
            for _ in range(30):
                spend("wait")
                yield 1
        for batch in gpuwatch.watch(batches()):
            spend("train")
        pathlib.Path(__file__).with_name("share").write_text(str(100 * spent["wait"] / sum(spent.values())))
        """,
        tmp_path,
    )
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("gpuwatch · train.py · ") and "30 steps" in lines[0]
    output, _, share = lines[1].partition("so far input-bound: ")
    assert re.fullmatch(r"  short: [\d.]+ m?s in training steps, too little for a prediction; ", output), output
    assert int(share.partition("%")[0]) == pytest.approx(float((tmp_path / "share").read_text()), abs=10)
    assert done.stderr.count("gpuwatch ·") == 1


ENDINGS: dict[str, tuple[str, int, str]] = {
    "falls off its end": ("pass", 0, ""),
    "sys.exit in the loop": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ValueError('loss is nan')", 1, "ValueError: loss is nan"),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("style", ["for batch in gpuwatch.watch(range(9)):", "for batch in w.steps(range(9)):"])
def test_however_it_ends_the_verdict_is_printed_and_the_traceback_is_the_users(
    tmp_path: Path, how: str, style: str
) -> None:
    statement, status, last = ENDINGS[how]
    done = run(
        f"""
        import os, signal, sys, time, gpuwatch
        w = gpuwatch.Watch()
        {style}
            time.sleep(0.01)
            if batch == 5:
                {statement}
        """,
        tmp_path,
        status,
    )
    assert done.stderr.count("gpuwatch ·") == 1
    assert ("9 steps" if how == "falls off its end" else "6 steps") in done.stderr
    if last:
        traceback = done.stderr[done.stderr.index("Traceback (most recent call last):") :]
        assert traceback.rstrip().endswith(last)
        assert traceback.count("File ") == 1 and f"{Path(gpuwatch.__file__).parent}/" not in traceback


def test_os_exit_is_left_alone(tmp_path: Path) -> None:
    done = run(
        """
        import os, gpuwatch
        for batch in gpuwatch.watch(range(9)):
            os._exit(7)
        """,
        tmp_path,
        7,
    )
    assert done.stderr == ""


def test_disabled_and_quiet(tmp_path: Path) -> None:
    script = """
        import threading, gpuwatch
        with gpuwatch.Watch() as w:
            for batch in w.steps(range(9)): pass
            print(sorted(thread.name for thread in threading.enumerate()))
        """
    assert run(script, tmp_path, GPUWATCH_DISABLE="1").stdout == "['MainThread']\n"
    quiet = run(script, tmp_path, GPUWATCH_QUIET="1")
    assert (quiet.stdout, quiet.stderr) == ("['MainThread', 'gpuwatch']\n", "")


def test_a_bad_endpoint_is_named_once_and_training_goes_on(tmp_path: Path) -> None:
    done = run(
        """
        import time, gpuwatch
        for batch in gpuwatch.watch(range(8)): time.sleep(0.2)
        """,
        tmp_path,
        GPUWATCH_ENDPOINT="tcp://node-17:9479",
    )
    assert done.stderr.count("GPUWATCH_ENDPOINT=tcp://node-17:9479: give ipc") == 1
    assert "8 steps" in done.stderr


@pytest.mark.alone
def test_without_an_agent_nothing_grows_over_400_000_steps(tmp_path: Path) -> None:
    """What waits for a declared agent is full after 90,000 steps: 4 MiB.

    Python's own allocator keeps 40 MB more of it, in pieces, as bursts of steps come and go: 48 to 80 MB in one test.
    """
    done = run(
        """
        import ctypes, gc, os, pathlib, threading, time, gpuwatch
        w = gpuwatch.Watch(quiet=True)
        def steps(count):  # what the log holds until it is emptied, twice a second, is no more on a slow machine
            for _ in range(count // 20_000):
                for _ in w.steps(range(20_000)): pass
                w.report()
        def resident_bytes():
            w.report(); time.sleep(0.7); gc.collect(); ctypes.CDLL(None).malloc_trim(0)
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        before = resident_bytes()
        steps(1_200_000)
        full = resident_bytes()
        steps(400_000)
        after = resident_bytes()
        print(full - before, after - full, w.report().steps, len(threading.enumerate()))
        """,
        tmp_path,
        PYTHONMALLOC="malloc",
    )
    filling, growth, steps, threads = map(int, done.stdout.split())
    assert filling < 60_000_000
    assert growth < 10_000_000
    assert (steps, threads) == (1_600_000, 2)


def test_forked_children_report_nothing_end_cleanly_and_do_not_end_the_run(tmp_path: Path) -> None:
    socket = tmp_path / "a.sock"
    receiver = ZmqReceiver([f"ipc://{socket}"])
    try:
        done = run(
            """
            import os, sys, time, gpuwatch
            w = gpuwatch.Watch(run="forks")
            statuses = []
            for batch in w.steps(range(6)):
                time.sleep(0.15)
                if batch in (2, 4):
                    child = os.fork()
                    if child == 0:
                        with w.step(), w.data(), w.phase("eval"): pass
                        for _ in w.steps(range(3)): pass
                        w.close()
                        if batch == 2: sys.exit(5)
                        os._exit(6)
                    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            print(statuses)
            """,
            tmp_path,
            GPUWATCH_ENDPOINT=f"ipc://{socket}",
        )
        messages = receive_until(receiver, lambda seen: any(isinstance(m, wire.Bye) for m in seen))
    finally:
        receiver.close()
    assert done.stdout == "[5, 6]\n"
    assert done.stderr.count("gpuwatch ·") == 1 and "6 steps" in done.stderr
    assert len({message.origin.sender for message in messages}) == 1
    assert [type(message).__name__ for message in messages].count("Bye") == 1
    bye = messages[-1]
    assert isinstance(bye, wire.Bye) and bye.totals.steps == 6


def test_a_forked_child_may_train_on_its_own(tmp_path: Path) -> None:
    done = run(
        """
        import os, time, gpuwatch
        parent = gpuwatch.Watch(quiet=True)
        parent.__enter__()
        child = os.fork()
        if child == 0:
            for batch in gpuwatch.watch(range(7)): time.sleep(0.01)
            raise SystemExit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        tmp_path,
    )
    assert done.stdout == "0\n"
    assert "7 steps" in done.stderr and done.stderr.count("gpuwatch ·") == 1


def test_without_a_thread_to_be_had_the_training_goes_on_and_one_line_says_so(tmp_path: Path) -> None:
    done = run(
        """
        import threading, gpuwatch
        start = threading.Thread.start
        def refuse(thread):
            if thread.name == "gpuwatch":
                raise RuntimeError("can't start new thread")
            start(thread)
        threading.Thread.start = refuse
        print(sum(gpuwatch.watch(range(7))))
        """,
        tmp_path,
    )
    assert done.stdout == "21\n"
    assert done.stderr.count("\n") == 1 and "records nothing more: RuntimeError" in done.stderr


def test_training_in_another_thread_and_reports_from_the_main_one(tmp_path: Path) -> None:
    done = run(
        """
        import json, threading, time, gpuwatch
        w = gpuwatch.Watch(quiet=True)
        def train():
            for batch in w.steps(range(2_000)):
                end = time.perf_counter() + 0.0005
                while time.perf_counter() < end: pass
        thread = threading.Thread(target=train); thread.start()
        worst, last = 0.0, {}
        while thread.is_alive():
            report = w.report()
            worst = max(worst, abs(sum(report.states.values()) - report.duration_s))
            final = {s: v - report.provisional.get(s, 0.0) for s, v in report.states.items()}
            assert all(v >= final.get(s, 0.0) - 1e-6 or v - final.get(s, 0) < 1e-6 for s, v in last.items())
            last = final
        thread.join()
        print(json.dumps([worst, w.report().steps, w.report().states["compute"]]))
        """,
        tmp_path,
    )
    worst, steps, compute = json.loads(done.stdout)
    assert worst < 1e-6 and steps == 2000 and compute > 0.95


def receive_until(receiver: ZmqReceiver, done: Any, timeout_s: float = 60) -> list[wire.Message]:
    messages: list[wire.Message] = []
    deadline = time.monotonic() + timeout_s
    while not done(messages):
        assert time.monotonic() < deadline, [type(message).__name__ for message in messages]
        list(receiver.connections())  # else `receive` returns at once from the first one on
        messages += [wire.decode(frame) for frame, _ in receiver.receive(100)]
    return messages


def test_an_agent_that_comes_later_is_found_and_the_totals_close(tmp_path: Path) -> None:
    socket = tmp_path / "later.sock"
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, time, gpuwatch\n"
        "for number in gpuwatch.watch(range(800)):\n"
        "    time.sleep(0.01)\n"
        "    while number == 150 and not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(socket)],
        env={**os.environ, "GPUWATCH_ENDPOINT": f"ipc://{socket}", "GPUWATCH_QUIET": "1"},
    )
    try:
        time.sleep(1.5)
        receiver = ZmqReceiver([f"ipc://{socket}"])
        try:
            messages = receive_until(receiver, lambda seen: any(isinstance(m, wire.Bye) for m in seen))
        finally:
            receiver.close()
    finally:
        process.kill()
        process.wait(10)
    assert {"Hello", "Steps", "Bye"} == {type(message).__name__ for message in messages}
    steps = [message for message in messages if isinstance(message, wire.Steps)]
    rows = sum(wire.step_count(message.columns) for message in steps)
    assert rows + steps[-1].totals.records_dropped == 800
    bye = messages[-1]
    assert isinstance(bye, wire.Bye) and bye.totals.steps == 800
    assert sum(bye.totals.states_ns.values()) == bye.totals.watermark_ns - bye.totals.start_ns


@pytest.mark.alone
@pytest.mark.parametrize("agent", ["absent", "stopped"])
def test_the_end_of_a_training_waits_at_most_a_second_for_an_agent(tmp_path: Path, agent: str) -> None:
    socket = tmp_path / "stuck.sock"
    receiver = ZmqReceiver([f"ipc://{socket}"]) if agent == "stopped" else None  # never read from
    try:
        done = run(
            """
            import atexit, time, gpuwatch
            w = gpuwatch.Watch(quiet=True)
            for _ in w.steps(range(100)):
                time.sleep(0.005)
                for _ in range(20):
                    with w.phase("x"): pass
            begin = time.perf_counter()
            w.close()
            print(time.perf_counter() - begin)
            """,
            tmp_path,
            GPUWATCH_ENDPOINT=f"ipc://{socket}",
        )
    finally:
        if receiver is not None:
            receiver.close()
    assert float(done.stdout) < 1.0


def test_a_hook_that_cannot_open_a_socket_trains_on(tmp_path: Path) -> None:
    done = run(
        """
        import time, zmq, gpuwatch
        def broken(*_): raise zmq.ZMQError(24)
        zmq.Context.socket = broken
        for _ in gpuwatch.watch(range(10)): time.sleep(0.6)
        """,
        tmp_path,
    )
    assert done.stderr.count("publishing to the agent failed") == 1
    assert "10 steps" in done.stderr


def test_loader_workers_that_watch_report_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(
        """
        import sys, time, warnings
        warnings.simplefilter("ignore")
        import gpuwatch
        from torch.utils.data import DataLoader, IterableDataset
        class Files(IterableDataset):
            def __iter__(self):
                for index in gpuwatch.watch([1, 2, 3]):
                    yield index
        if __name__ == "__main__":
            for context in ("fork", "spawn"):
                for batch in gpuwatch.watch(DataLoader(Files(), num_workers=1, multiprocessing_context=context)):
                    time.sleep(0.01)
        """,
        tmp_path,
    )
    assert done.stderr.count("6 steps of") == 1
    assert done.stderr.count("gpuwatch ·") == 1, "at the end: a pass that trained nothing is not reported when it ends"
