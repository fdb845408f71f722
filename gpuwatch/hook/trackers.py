"""`Watch(log="auto")`: the run's shares in the experiment tracker that the program uses anyway, every 30 s and at the end.

The background thread prepares the numbers; the training thread hands them over between two steps, on a fetch that is sampled
anyway, by calls that queue and do not wait. The other steps have nothing to do.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from gpuwatch.errors import ConfigError

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report

logger = logging.getLogger(__name__)

INTERVAL_NS = 30_000_000_000
REDRAW_NS = 2_000_000_000
_FINISH_S = 5.0
"""A tracker's server that does not answer delays the end of a run by no more."""
VERDICT, PAGE = "gpuwatch/verdict", "gpuwatch-report.html"
Values = dict[str, float]


class WandbRun:
    """W&B. Values go into the program's own next row: its step counter is left alone."""

    name = "W&B"

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, values: Values, report: Report) -> None:
        self.run.log(values, commit=False)
        self.run.summary.update({**report.metrics(), VERDICT: report.verdict.sentence})

    def finish(self, report: Report, page: str) -> None:
        from wandb import Artifact  # type: ignore[import-not-found,unused-ignore]

        self.log({}, report)
        artifact = Artifact(f"gpuwatch-report-{self.run.id}", type="report")
        with artifact.new_file(PAGE) as file:
            file.write(page)
        self.run.log_artifact(artifact)


class MlflowRun:
    """MLflow, by its client and the run's id: it may be called from any thread, and after the run has ended."""

    name = "MLflow"

    def __init__(self, run: Any) -> None:
        from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]

        self._client, self.run = MlflowClient(), str(run.info.run_id)

    def log(self, values: Values, report: Report) -> None:
        self._batch({**values, **report.metrics()}, report.steps, synchronous=False)
        self._client.set_tag(self.run, VERDICT, report.verdict.sentence, synchronous=False)

    def finish(self, report: Report, page: str) -> None:
        self._batch(report.metrics(), report.steps, synchronous=True)
        self._client.set_tag(self.run, VERDICT, report.verdict.sentence)
        self._client.log_text(self.run, page, PAGE)

    def _batch(self, values: Values, step: int, synchronous: bool) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found,unused-ignore]

        now_ms = int(time.time() * 1000)
        metrics = [Metric(key, value, now_ms, step) for key, value in values.items()]
        self._client.log_batch(self.run, metrics=metrics, synchronous=synchronous)


class TensorBoardWriter:
    """TensorBoard, by the program's `SummaryWriter`: torch's or tensorboardX's."""

    name = "TensorBoard"

    def __init__(self, writer: Any) -> None:
        self.run = writer

    def log(self, values: Values, report: Report) -> None:
        for key, value in values.items():
            self.run.add_scalar(key, value, report.steps)

    def finish(self, report: Report, page: str) -> None:
        self.log(report.metrics(), report)
        self.run.add_text(VERDICT, report.verdict.sentence, report.steps)
        text = "\n".join(f"    {line}" for line in str(report).splitlines())  # Markdown for text as it is
        self.run.add_text("gpuwatch/report", text, report.steps)
        self.run.flush()


class TrackioRun:
    """Trackio."""

    name = "Trackio"

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, values: Values, report: Report) -> None:
        self.run.log({**values, VERDICT: report.verdict.sentence})

    def finish(self, report: Report, page: str) -> None:
        self.log(report.metrics(), report)


class AimRun:
    """Aim."""

    name = "Aim"

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, values: Values, report: Report) -> None:
        self.run.track(values, step=report.steps)
        self.run[VERDICT] = report.verdict.sentence

    def finish(self, report: Report, page: str) -> None:
        from aim import Text  # type: ignore[import-not-found,unused-ignore]

        self.log(report.metrics(), report)
        self.run.track(Text(str(report)), name="gpuwatch/report", step=report.steps)


class Callback:
    """The user's function of a dictionary and a step, for any other tracker."""

    def __init__(self, call: Callable[[Values, int], object]) -> None:
        self.run = call
        self.name = getattr(call, "__qualname__", "the function given as log")

    def log(self, values: Values, report: Report) -> None:
        self.run(values, report.steps)

    def finish(self, report: Report, page: str) -> None:
        self.run(report.metrics(), report.steps)


class Notebook:
    """A notebook's cell: the verdict, redrawn in place."""

    name = "the notebook"
    run = "notebook"

    def __init__(self) -> None:
        self._cell, self._handle = -1, cast(Any, None)

    def log(self, values: Values, report: Report) -> None:
        self.show(report)

    def finish(self, report: Report, page: str) -> None:
        """The verdict is shown when it is due."""

    def show(self, report: Report) -> None:
        """Draw it in the cell that runs now: where that one has it, in place."""
        from IPython import get_ipython
        from IPython.display import display

        cell = get_ipython().execution_count
        if self._handle is None or cell != self._cell:
            self._cell, self._handle = cell, display(report, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self._handle.update(report)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook: IPython's alone, in a terminal, has none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


Tracker = Notebook | WandbRun | MlflowRun | TensorBoardWriter | TrackioRun | AimRun | Callback


def tracker_of(run: Any) -> Tracker:
    """Return how to log to a tracker's run, a SummaryWriter or a function. Raises: ConfigError for anything else."""
    if isinstance(run, Notebook):
        return run
    package = type(run).__module__.partition(".")[0]
    kinds: dict[str, Callable[[Any], Tracker]] = {
        "wandb": WandbRun,
        "mlflow": MlflowRun,
        "trackio": TrackioRun,
        "aim": AimRun,
    }
    if package in kinds:
        return kinds[package](run)
    if hasattr(run, "add_scalar") and hasattr(run, "add_text"):
        return TensorBoardWriter(run)
    if callable(run):
        return Callback(run)
    raise ConfigError(
        f"log={run!r}: give 'auto', a run of W&B, MLflow, Trackio or Aim, a SummaryWriter, or a function of (values, step)"
    )


def active_trackers() -> list[Tracker]:
    """Return those whose run is active in this thread, of the trackers that the program has imported."""
    found: list[Any] = []
    modules = sys.modules
    if (wandb := modules.get("wandb")) is not None:
        found.append(getattr(wandb, "run", None))
    if (mlflow := modules.get("mlflow")) is not None:
        found.append(mlflow.active_run())
    if (trackio := modules.get("trackio.context_vars")) is not None:
        found.append(trackio.current_run.get())
    return [tracker_of(run) for run in found if run is not None]


def _unregistered() -> frozenset[object]:
    """Return what shows that there is a TensorBoard writer or an Aim run: the writers' threads, Aim's module."""
    threads = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard")]
    return frozenset((*threads, *(["aim"] if "aim.sdk.run" in sys.modules else [])))


def find_unregistered() -> list[Tracker]:
    """Return TensorBoard's writers and Aim's runs, which no module knows, by one search of all objects: 0.1 s for 200,000 of them."""
    names = (
        ("torch.utils.tensorboard.writer", "SummaryWriter"),
        ("tensorboardX.writer", "SummaryWriter"),
        ("aim.sdk.run", "Run"),
    )
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in names if hasattr(sys.modules.get(module), name)
    )
    found = [each for each in gc.get_referrers(*kinds) if isinstance(each, kinds)] if kinds else []
    return [tracker_of(each) for each in found if getattr(each, "file_writer", True) is not None]  # else it is closed


class LiveLog:
    """Hands a run's values to trackers: prepared by the background thread, taken by the training thread between two steps."""

    def __init__(
        self,
        wanted: Any,
        report: Callable[[], Report],
        failed: Callable[[str, BaseException], None],
        now_ns: int,
        interval_ns: int = INTERVAL_NS,
    ) -> None:
        """`wanted` is "auto", a tracker's run or several. `failed` is called with what has failed, and why."""
        given = wanted if isinstance(wanted, list | tuple) else [wanted]
        self._auto = wanted == "auto"
        self._given = [] if self._auto else [tracker_of(each) for each in given]
        self._active: list[Tracker] = []
        self._left_out: list[Any] = []
        """Runs that have failed."""
        self._report = report
        self._failed = failed
        self._interval_ns = interval_ns
        self._due_ns = now_ns + interval_ns
        self._searched: frozenset[object] = frozenset()
        self._logged: Report | None = None
        self.prepared: tuple[Report, Values] | None = None
        """What the training thread is to hand over at the next boundary of steps."""

    def prepare(self, now_ns: int) -> None:
        """Prepare values every 30 s. Called by the background thread, twice a second."""
        if self._auto:
            self._guarded("TensorBoard and Aim", self._search)
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + self._interval_ns
            report = self._report()
            if report.steps:
                values = report.metrics(since=self._logged)
                self.prepared = report, {key.replace("/", "/live/"): value for key, value in values.items()}

    def pass_ended(self, now_ns: int) -> None:
        """Log after the first pass, and after a later one when values are due: a tracker's run may end before the Watch does."""
        self.prepare(now_ns if self._logged else self._due_ns)
        self.hand_over()

    def hand_over(self) -> None:
        """Log what was prepared. Called by the training thread, between two steps."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            report, values = prepared
            self._logged = report
            for tracker in self._trackers():
                self._call(tracker, lambda tracker=tracker: tracker.log(values, report))  # type: ignore[misc]

    def finish(self, report: Report, is_first_rank: bool) -> None:
        """Log the run as it ended, and its page; takes five seconds at most."""
        if self._auto:
            self._guarded("TensorBoard and Aim", self._search)
        trackers = self._trackers()
        if not trackers:
            if is_first_rank and self._auto and not self._left_out:
                logger.warning(
                    "gpuwatch: log='auto' found no run of W&B, MLflow, TensorBoard, Trackio or Aim; begin it before the "
                    "loop, or give it: log=run"
                )
            return
        from gpuwatch.diagnosis.html import page

        text = page(report)

        def finish() -> None:
            for tracker in trackers:
                self._call(tracker, lambda: tracker.finish(report, text))  # noqa: B023

        thread = threading.Thread(target=finish, name="gpuwatch-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            finish()
            return
        thread.join(_FINISH_S)
        if thread.is_alive():
            logger.warning("gpuwatch: %s did not take the report within %.0f s", trackers[0].name, _FINISH_S)

    def _trackers(self) -> list[Tracker]:
        """Return the trackers to log to: those given or searched for, and those active now or, if none is, before."""
        if self._auto:
            self._guarded("experiment trackers", self._find_active)
        return [tracker for tracker in (*self._given, *self._active) if tracker.run not in self._left_out]

    def _search(self) -> None:
        """Search for the trackers that no module knows, once for each new writer."""
        if (present := _unregistered()) - self._searched:
            self._given = find_unregistered()
        self._searched = present

    def _find_active(self) -> None:
        self._active = active_trackers() or self._active

    def _call(self, tracker: Tracker, call: Callable[[], None]) -> None:
        if not self._guarded(tracker.name, call):
            self._left_out.append(tracker.run)

    def _guarded(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._failed(f"logging to {name}", error)
            return False
        return True
