"""Signal handlers and finalizers that call gpuwatch during its own work: nothing hangs, and the ledger closes.

Each is a real process with a time limit, because what goes wrong here hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpuwatch import wire
from tests.integration.hook.test_process_safety import received, receiver

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.alone]  # a goodbye is sent within 0.3 s or never

HEAD = """
import gc, json, os, signal, sys, threading, time
sys.setswitchinterval(1e-4)
import gpuwatch
from gpuwatch.hook.account import Accounts
def off(report):
    return abs(sum(report.states.values()) - report.duration_s)
"""


def run(tmp_path: Path, source: str, endpoint: str = "", expect: int = 0, **environ: str) -> tuple[Any, str]:
    """Run a script for 30 seconds at most; return what it printed as JSON, and its stderr."""
    path = tmp_path / "train.py"
    path.write_text(HEAD + textwrap.dedent(source))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUWATCH_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**clean, **({"GPUWATCH_ENDPOINT": endpoint} if endpoint else {}), **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return (json.loads(done.stdout) if done.stdout else None), done.stderr


def test_reports_in_signal_handlers_while_reports_are_made(tmp_path: Path) -> None:
    """Two signals, whose handlers report, keep interrupting a loop of steps and reports, and each other."""
    result, err = run(
        tmp_path,
        """
        w = gpuwatch.Watch(quiet=True)
        seen, worst = [], 0.0
        def handler(number, frame):
            global worst
            report = w.report()
            seen.append(number)
            worst = max(worst, off(report))
            if number == signal.SIGALRM: signal.setitimer(signal.ITIMER_REAL, 0.0007)  # from the end on: a report takes longer
        signal.signal(signal.SIGALRM, handler), signal.signal(signal.SIGUSR1, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0007)
        def fire():
            while not done.wait(0.031): os.kill(os.getpid(), signal.SIGUSR1)
        done = threading.Event()
        firing = threading.Thread(target=fire)
        firing.start()
        begin, steps = time.monotonic(), 0
        while time.monotonic() - begin < 3:
            for _ in w.steps(range(20)): pass
            steps += 20
            report = w.report()
            worst = max(worst, off(report))
            assert report.steps <= steps
        done.set(), firing.join()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        report = w.report()
        w.close()
        print(json.dumps([report.steps - steps, worst, w._publisher.accounts.failures, len(seen), len(set(seen))]))
        """,
    )
    lost, worst, failures, calls, kinds = result
    assert (lost, failures, kinds, err) == (0, 0, 2, "")
    assert worst < 1e-6
    assert calls > 100


@pytest.mark.parametrize("then", ["w.report()", "w.close()"])
@pytest.mark.parametrize("inside", ["apply", "window", "finish", "take_delta", "settle_cost"])
def test_a_handler_that_comes_while_the_books_are_held(tmp_path: Path, inside: str, then: str) -> None:
    """The handler runs inside the books' own method, after it has begun. The run ends once, with every step."""
    source = f"""
        from gpuwatch.ledger.timeline import Timeline
        w = gpuwatch.Watch(quiet=True)
        states = []
        def handler(*_):
            report = {then} or w.report()
            states.append([off(report), sum(report.states.values()) > 0])
        signal.signal(signal.SIGUSR1, handler)
        for _ in w.steps(range(100)): time.sleep(0.0001)
        fired = []
        def interrupted(owner, name):
            original = getattr(owner, name)
            def call(*args, **options):
                if threading.current_thread() is threading.main_thread() and not fired:
                    fired.append(name)
                    signal.raise_signal(signal.SIGUSR1)
                return original(*args, **options)
            setattr(owner, name, call)
        interrupted(*((Timeline, "apply") if {inside!r} == "apply" else (Accounts, {inside!r})))
        report = w.report()
        w.close()
        last = w.report()
        line = w._publisher.accounts.timeline.ledger
        print(json.dumps([fired, states, report.steps, last.steps, off(last), line.sum_ns - line.watermark_ns + line.start_ns,
                          w._publisher.accounts.failures]))
    """
    with receiver(tmp_path) as (listening, where):
        (fired, states, steps, last_steps, error, missing, failures), err = run(tmp_path, source, where)
        byes = [message for message in received(listening) if isinstance(message, wire.Bye)]
    assert fired == [inside]
    assert (last_steps, missing, failures, err) == (100, 0, 0, "")
    assert error < 1e-6
    assert [row[1] for row in states] == [True] and states[0][0] < 1e-6
    assert steps == 100
    assert [bye.totals.steps for bye in byes] == [100]


def test_close_in_a_handler_during_reports_ends_the_run_once(tmp_path: Path) -> None:
    source = """
        w = gpuwatch.Watch(run="closed")
        signal.signal(signal.SIGALRM, lambda *_: w.close())
        for _ in w.steps(range(50)): time.sleep(0.001)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        while not w.session.closed: w.report()
        took = time.monotonic() - begin
        print(json.dumps([took, w.report().steps, off(w.report())]))
    """
    with receiver(tmp_path) as (listening, where):
        (took, steps, error), err = run(tmp_path, source, where)
        byes = [message for message in received(listening) if isinstance(message, wire.Bye)]
    assert len(byes) == 1 and byes[0].totals.steps == steps == 50
    assert sum(byes[0].totals.states_ns.values()) == byes[0].totals.watermark_ns - byes[0].totals.start_ns
    assert took < 1.0 and error < 1e-6
    assert err.count("gpuwatch · closed") == 1


def test_what_a_handler_raises_reaches_the_user_and_later_reports_still_close(tmp_path: Path) -> None:
    result, err = run(
        tmp_path,
        """
        w = gpuwatch.Watch(quiet=True)
        class Stop(Exception): pass
        armed = False
        def handler(*_):
            if armed: raise Stop
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        raised, worst, begin = 0, 0.0, time.monotonic()
        while time.monotonic() - begin < 2:
            with w.phase("eval"): pass
            for _ in w.steps(range(20)): pass
            try:
                armed = True
                w.report()
                armed = False
            except Stop:
                armed = False
                raised += 1
            worst = max(worst, off(w.report()))
        signal.setitimer(signal.ITIMER_REAL, 0)
        w.close()
        accounts = w._publisher.accounts
        print(json.dumps([raised, worst, accounts.blind, off(w.report()), accounts.failures]))
        """,
    )
    raised, worst, blind, error, failures = result
    assert raised > 10
    assert (blind, failures) == (False, 0)
    assert "gpuwatch:" not in err
    assert worst < 1e-6 and error < 1e-6


def test_an_iterator_collected_by_the_background_thread(tmp_path: Path) -> None:
    """It lies in a cycle, and is found by the garbage collector while the background thread holds the books."""
    result, err = run(
        tmp_path,
        """
        gc.disable()
        w = gpuwatch.Watch(run="collected")
        class Holder: pass
        holder = Holder()
        holder.itself, holder.iterator = holder, iter(w.steps(range(1000)))
        for _ in range(10): next(holder.iterator)
        del holder
        collected = []
        fold = Accounts.apply
        def collecting(self, now_ns):
            fold(self, now_ns)
            if threading.current_thread().name == "gpuwatch" and not collected: collected.append(gc.collect())
        Accounts.apply = collecting
        begin = time.monotonic()
        while not collected and time.monotonic() - begin < 10: time.sleep(0.01)
        time.sleep(0.2)
        print(json.dumps([collected[0] > 0, len(w.session.loops), w.report().steps]), flush=True)
        printed = os.fstat(2).st_size
        """,
    )
    collected, loops, steps = result
    assert collected and loops == 0
    assert steps == 10
    assert err.count("gpuwatch · collected") == 1, "the verdict, at the end and by the main thread"


@pytest.mark.parametrize("call", ["report", "close"])
def test_a_finalizer_in_the_background_thread_that_calls_gpuwatch(tmp_path: Path, call: str) -> None:
    source = f"""
        gc.disable()
        w = gpuwatch.Watch(quiet=True)
        class Trainer:
            def __init__(self): self.itself = self
            def __del__(self): where.append(threading.current_thread().name), w.{call}()
        where, fold = [], Accounts.apply
        trainer = Trainer()
        for _ in w.steps(range(10)): time.sleep(0.001)
        def collecting(self, now_ns):
            fold(self, now_ns)
            if threading.current_thread().name == "gpuwatch" and not where: gc.collect()
        Accounts.apply = collecting
        del trainer
        begin = time.monotonic()
        while not (where and w.session.closed == ({call!r} == "close")) and time.monotonic() - begin < 10: time.sleep(0.01)
        time.sleep(0.3)
        print(json.dumps([where, w.session.closed, w.report().steps, w._publisher.accounts.failures]))
    """
    with receiver(tmp_path) as (listening, where):
        result, err = run(tmp_path, source, where)
        byes = [message for message in received(listening) if isinstance(message, wire.Bye)]
    assert result == [["gpuwatch"], call == "close", 10, 0]
    assert [bye.totals.steps for bye in byes] == [10]
    assert err == ""
