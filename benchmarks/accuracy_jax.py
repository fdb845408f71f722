"""How much wait for data gpuwatch reports of a JAX training, and how much there was: `python benchmarks/accuracy_jax.py [SCENARIO…] [--json]`.

Real JAX, on whatever device it has. The truth is not gpuwatch's: a thread blocks until each step's loss is ready and reads the clock, the
loader reads the clock around each of its batches, and what lies between is what the device felt.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import gpuwatch

STEPS = 80


@dataclass(frozen=True)
class Scenario:
    """A loop: times in ms."""

    fetch_ms: tuple[float, ...]
    """Of one batch after another, over and over."""
    work_ms: float
    waits: bool = False
    """The loop reads the loss after each step."""
    donates: bool = False
    in_contexts: bool = False
    """`with w.step()` and `with w.data()` in place of a loader."""


SCENARIOS = {
    "hidden wait": Scenario((8,), 25),
    "partly hidden wait": Scenario((40,), 20),
    "partly hidden, donated": Scenario((40,), 20, donates=True),
    "partly hidden, contexts": Scenario((40,), 20, in_contexts=True),
    "long waits": Scenario((60,), 5),
    "loss read each step": Scenario((20,), 20, waits=True),
    "burst every 4th": Scenario((90, 1, 1, 1), 12),
    "quick steps": Scenario((5,), 2),
}


@dataclass(frozen=True)
class Outcome:
    """Shares of the wall time, 0–1."""

    truth: float
    host_clock: float
    """What the loop waited, hidden or not."""
    reported: float
    device: str
    timeline: str
    coverage: float
    verdict: str
    hook_us: float | None
    """What a step cost in the training thread."""
    polls_us: float
    """What a step cost in the thread that polls."""
    loss: float
    """The last one: the training itself."""


class Truth:
    """When the device had computed each step, by a thread that blocks on it; and when batches were asked for and came."""

    def __init__(self, on: bool) -> None:
        self.asked: list[float] = []
        self.fed: list[float] = []
        self._done: list[float] = []
        self._losses: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._block)
        self._on = on
        if on:
            self._thread.start()

    def launched(self, loss: Any) -> None:
        if self._on:
            self._losses.put(loss)

    def _block(self) -> None:
        while (loss := self._losses.get()) is not None:
            loss.block_until_ready()
            self._done.append(time.perf_counter())

    def felt_s(self) -> float:
        """Return for how long the device had nothing to do while a batch was waited for."""
        if not self._on:
            return 0.0
        self._losses.put(None)
        self._thread.join()
        done = [0.0, *self._done]
        return sum(
            max(0.0, fed - max(asked, before)) for asked, fed, before in zip(self.asked, self.fed, done, strict=False)
        )


def make_step(work_ms: float, donates: bool) -> tuple[Any, Any]:
    """Return a jitted step that takes about so long on this device, and its first parameters."""
    import jax
    import jax.numpy as jnp

    def step(params: dict[str, Any], batch: Any, rounds: Any) -> tuple[dict[str, Any], Any]:
        def once(_: Any, w: Any) -> Any:
            return jnp.tanh(w @ params["mix"] + 1e-3 * batch)

        w = jax.lax.fori_loop(0, rounds, once, params["w"])
        return {"w": w, "mix": params["mix"] * 1.0}, jnp.mean(w)

    jitted = jax.jit(step, donate_argnums=(0,) if donates else ())

    def fresh() -> dict[str, Any]:
        key = jax.random.PRNGKey(0)
        return {"w": jax.random.normal(key, (160, 160)), "mix": jax.random.normal(key, (160, 160)) / 13.0}

    batch, probe = jnp.ones(()), 40
    jitted(fresh(), batch, probe)[1].block_until_ready()
    took = []
    for _ in range(5):
        params = fresh()
        params["mix"].block_until_ready()
        begin = time.perf_counter()
        jitted(params, batch, probe)[1].block_until_ready()
        took.append(time.perf_counter() - begin)
    rounds = max(1, round(probe * work_ms / 1e3 / sorted(took)[2]))
    return lambda params, batch: jitted(params, batch, rounds), fresh()


def run(scenario: Scenario, steps: int = STEPS, watched: bool = True, with_truth: bool = True) -> Outcome:
    """Run the scenario in this process."""
    import jax.numpy as jnp

    step, params = make_step(scenario.work_ms, scenario.donates)
    truth, waited = Truth(with_truth), 0.0

    def batches() -> Iterator[Any]:
        nonlocal waited
        for number in range(steps):
            begin = time.perf_counter()
            time.sleep(scenario.fetch_ms[number % len(scenario.fetch_ms)] / 1e3)
            batch = jnp.float32(number % 7)
            fed = time.perf_counter()
            truth.asked.append(begin)
            truth.fed.append(fed)
            waited += fed - begin
            yield batch

    loss: Any = None

    def train(batch: Any) -> None:
        nonlocal params, loss
        params, loss = step(params, batch)
        truth.launched(loss)
        if scenario.waits:
            float(loss)

    polls_s, report = 0.0, None
    if not watched:
        for batch in batches():
            train(batch)
    else:
        with gpuwatch.Watch(quiet=True, budget=0.2) as watch:
            if scenario.in_contexts:
                source = batches()
                for _ in range(steps):
                    with watch.step():
                        with watch.data():
                            batch = next(source)
                        train(batch)
            else:
                for batch in watch.steps(batches()):
                    train(batch)
            polls_s = _thread_s("gpuwatch-jax")
            report = watch.report()
    felt_s = truth.felt_s()
    if report is None:
        return Outcome(0.0, 0.0, 0.0, "", "", 0.0, "", None, 0.0, float(loss))
    return Outcome(
        truth=felt_s / report.duration_s,
        host_clock=waited / report.duration_s,
        reported=report.shares.get("input_wait", 0.0),
        device=report.device,
        timeline=report.timeline,
        coverage=report.coverage,
        verdict=report.verdict.sentence,
        hook_us=None if report.hook_s is None else report.hook_s / report.steps * 1e6,
        polls_us=polls_s / report.steps * 1e6,
        loss=float(loss),
    )


def _thread_s(name: str) -> float:
    """Return the CPU time of a thread of this process, in seconds; 0 where there is none of that name."""
    thread = next((thread for thread in threading.enumerate() if thread.name == name), None)
    return (
        0.0 if thread is None or thread.ident is None else time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scenario",
        nargs="*",
        help=f"one of {', '.join(SCENARIOS)}; all of them, each in a process of its own, where none is named",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--unwatched", action="store_true", help="train without gpuwatch")
    parser.add_argument("--no-truth", action="store_true", help="without the thread that blocks")
    options = parser.parse_args()
    if len(options.scenario) == 1 and options.json:
        outcome = run(SCENARIOS[options.scenario[0]], watched=not options.unwatched, with_truth=not options.no_truth)
        print(json.dumps(asdict(outcome)))
        return
    rows = []
    for name in options.scenario or SCENARIOS:
        made = subprocess.run([sys.executable, __file__, name, "--json"], check=True, capture_output=True, text=True)
        rows.append((name, Outcome(**json.loads(made.stdout))))
        if not options.json:
            _print_row(*rows[-1], first=len(rows) == 1)
    if options.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in rows}))


def _print_row(name: str, outcome: Outcome, first: bool) -> None:
    if first:
        print("| scenario | a batch, ms | work, ms | host clock | truth | gpuwatch | error, points |")
        print("|---|---|---:|---:|---:|---:|---:|")
    scenario, error = SCENARIOS[name], 100 * (outcome.reported - outcome.truth)
    shares = " | ".join(f"{100 * share:.1f}" for share in (outcome.host_clock, outcome.truth, outcome.reported))
    print(
        f"| {name} | {', '.join(f'{ms:g}' for ms in scenario.fetch_ms)} | {scenario.work_ms:g} | {shares} | {error:+.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
