"""A real agent and real training processes for tests: subprocesses on free ports and sockets of their own.

with Agent(tmp_path) as agent, Trainer(agent, data_s=0.03, compute_s=0.01) as trainer:
    agent.wait_run(trainer.run)["states"]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpuwatch.metrics import BY_NAME
from tests.servers import free_port, wait_for

Series = dict[tuple[str, ...], float]
"""Values by (name, label values …) in the catalogue's order of labels, a bucket's bound last."""

PATIENT = """
from gpuwatch.hook import publisher
from gpuwatch.wire import sockets
publisher._CLOSE_S, publisher._CONNECT_TRIES, sockets._LINGER_MS = 30.0, 300, 5_000
"""
"""Before a program: at its end neither its own thread nor the agent hangs, though they may get no core for seconds."""

_TRAINER = (
    PATIENT
    + """
import json, signal, sys, time
import gpuwatch

asked_to_end = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked_to_end.append(number))

data_s, compute_s, seconds = map(float, sys.argv[1:])

class Batch:
    shape, nbytes = (8,), 64

def batches():
    end = time.monotonic() + seconds
    while not asked_to_end and time.monotonic() < end:
        time.sleep(data_s)
        yield Batch()

with gpuwatch.Watch(quiet=True) as w:
    for _ in w.steps(batches()):
        time.sleep(compute_s)
report = w.report()
print(json.dumps({"states": dict(report.states), "steps": report.steps, "samples": report.samples}))
"""
)


class Agent:
    """One `gpuwatch agent`, with all of its series.

    It may be killed and started again on the same port, socket and history.

    `general`: options of gpuwatch itself, as `--verbose`.
    """

    def __init__(
        self, directory: Path, *options: str, environment: Mapping[str, str] | None = None, general: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.endpoint = f"ipc://{directory}/hook.sock"
        self.history = directory / "history.db"
        self.log = directory / "agent.log"
        self._options, self._general = options, general
        self._environment = dict(environment or os.environ)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *options: str) -> list[str]:
        given = [
            *(["--http", f"127.0.0.1:{self.port}"] if "--http" not in options else []),
            *(["--listen", self.endpoint] if "--listen" not in options else []),
            *(["--history", str(self.history)] if "--history" not in options else []),
            *(["--series", "full"] if "--series" not in options else []),
        ]
        return [sys.executable, "-m", "gpuwatch", *self._general, "agent", *given, *options]

    def start(self) -> Agent:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command(*self._options), stdout=output, stderr=output, env=self._environment
            )
        try:
            wait_for("the agent is ready", self._ready, 60, 0.05)
        except BaseException:
            self.kill()
            raise
        return self

    def _ready(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()[-3000:]
        return self.get_text("/readyz") == "ok\n"

    def refused(self, *options: str) -> str:
        """Return what an agent with these options says before it ends with status 2."""
        done = subprocess.run(
            self.command(*options), env=self._environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stderr

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)

    def stop(self) -> int:
        """End it as a service manager does; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(45)

    def get_text(self, path: str, headers: Mapping[str, str] | None = None) -> str:
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=dict(headers or {})), timeout=30
        ) as r:
            text: str = r.read().decode()
            return text

    def get(self, path: str, **query: object) -> Any:
        """Return the JSON at a path, whatever its status; `query` becomes the query string."""
        text = f"?{urllib.parse.urlencode({name: str(value) for name, value in query.items()})}" if query else ""
        try:
            return json.loads(self.get_text(path + text))
        except urllib.error.HTTPError as error:
            with error:
                return {"status": error.code, **json.loads(error.read())}

    def metrics(self) -> Series:
        families = text_string_to_metric_families(self.get_text("/metrics"))
        return {(s.name, *_label_values(s.name, s.labels)): s.value for family in families for s in family.samples}

    def run(self, run: str) -> dict[str, Any] | None:
        found: list[dict[str, Any]] = self.get("/api/v1/runs")["runs"]
        return next((each for each in found if each["run"] == run), None)

    def wait_run(self, run: str, timeout_s: float = 45, **fields: object) -> dict[str, Any]:
        """Return the run once it is there with these values."""

        def look() -> dict[str, Any] | None:
            found = self.run(run)
            return found if found is not None and all(found[key] == value for key, value in fields.items()) else None

        return wait_for(f"run {run} with {fields}", look, timeout_s, 0.1)

    def __enter__(self) -> Agent:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


class Trainer:
    """A training process with a hook: `data_s` for each batch, `compute_s` for each step, for `seconds`."""

    def __init__(
        self,
        agent: Agent,
        *,
        data_s: float = 0.03,
        compute_s: float = 0.01,
        seconds: float = 600,
        run: str,
        job: str = "",
        environment: Mapping[str, str] | None = None,
    ):
        self.run = run
        own = {"GPUWATCH_RUN": run, "GPUWATCH_JOB": job, "GPUWATCH_ENDPOINT": agent.endpoint}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, str(data_s), str(compute_s), str(seconds)],
            env={**os.environ, **own, **(environment or {})},
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def finish(self) -> None:
        """Let it end after the step under way."""
        self.process.send_signal(signal.SIGUSR1)

    def report(self, timeout_s: float = 120) -> dict[str, Any]:
        """Return the run's own final report, once it has ended."""
        out, _ = self.process.communicate(timeout=timeout_s)
        report: dict[str, Any] = json.loads(out)
        return report

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _label_values(name: str, labels: Mapping[str, str]) -> list[str]:
    metric = BY_NAME[name]
    assert labels.keys() - {"le"} == set(metric.labels), name
    return [labels[label] for label in (*metric.labels, "le") if label in labels]


def run_states(series: Series, run: str) -> dict[str, float]:
    """Return a run's seconds by state from a page, the states without any left out."""
    return {key[3]: v for key, v in series.items() if key[:2] == ("gpuwatch_run_seconds_total", run) and v}


def watch_counters(agent: Agent, seconds: float, pages: list[Series], every_s: float = 0.25) -> None:
    """Scrape for a while, as a server would; a scrape that fails is left out."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            pages.append(agent.metrics())
        time.sleep(every_s)
