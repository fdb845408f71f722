"""`Watch(log="auto")`: the run's shares in the experiment tracker that the program uses, every 30 s and at the end.

The background thread prepares the numbers; the training thread hands them over between two steps, on a fetch that is
sampled anyway, by calls that queue and do not wait. The other steps have nothing to do.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from gpuwatch.errors import ConfigError

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report
    from gpuwatch.hook.recorder import Failed

logger = logging.getLogger(__name__)

INTERVAL_NS = 30_000_000_000
REDRAW_NS, REDRAW_PASS_NS = 2_000_000_000, 200_000_000  # a notebook's display, and at the end of a pass
_FINISH_S = 5.0  # a tracker's server that does not answer delays the end of a run by no more
VERDICT, PAGE = "gpuwatch/verdict", "gpuwatch-report.html"
Values = dict[str, float]


class Tracker:
    """How to log to one kind of tracker. `run` is the tracker's own object."""

    name = ""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, values: Values, report: Report) -> None:
        """Log live values and the run so far, without waiting. Called in the training thread."""
        raise NotImplementedError

    def finish(self, report: Report, page: str) -> None:
        """Log the run as it ended, with its page where the tracker takes one."""
        self.log(report.metrics(), report)


class WandbRun(Tracker):
    """W&B. Values go into the program's own next row: its step counter is left alone."""

    name = "W&B"

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


class MlflowRun(Tracker):
    """MLflow, by its client and the run's id: it may be called from any thread, and after the run has ended."""

    name = "MLflow"

    def __init__(self, run: Any) -> None:
        from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]

        self._client = MlflowClient()
        super().__init__(str(run.info.run_id))

    def log(self, values: Values, report: Report) -> None:
        self._send({**values, **report.metrics()}, report, synchronous=False)

    def finish(self, report: Report, page: str) -> None:
        self._send(report.metrics(), report, synchronous=True)
        self._client.log_text(self.run, page, PAGE)

    def _send(self, values: Values, report: Report, synchronous: bool) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found,unused-ignore]

        now_ms = int(time.time() * 1000)
        metrics = [Metric(key, value, now_ms, report.steps) for key, value in values.items()]
        self._client.log_batch(self.run, metrics=metrics, synchronous=synchronous)
        self._client.set_tag(self.run, VERDICT, report.verdict.sentence, synchronous=synchronous)


class TensorBoardWriter(Tracker):
    """TensorBoard, by the program's `SummaryWriter`: torch's or tensorboardX's."""

    name = "TensorBoard"

    def log(self, values: Values, report: Report) -> None:
        for key, value in values.items():
            self.run.add_scalar(key, value, report.steps)

    def finish(self, report: Report, page: str) -> None:
        super().finish(report, page)
        self.run.add_text(VERDICT, report.verdict.sentence, report.steps)
        text = "\n".join(f"    {line}" for line in str(report).splitlines())  # Markdown for text as it is
        self.run.add_text("gpuwatch/report", text, report.steps)
        self.run.flush()


class TrackioRun(Tracker):
    name = "Trackio"

    def log(self, values: Values, report: Report) -> None:
        self.run.log({**values, VERDICT: report.verdict.sentence})


class AimRun(Tracker):
    name = "Aim"

    def log(self, values: Values, report: Report) -> None:
        self.run.track(values, step=report.steps)
        self.run[VERDICT] = report.verdict.sentence

    def finish(self, report: Report, page: str) -> None:
        from aim import Text  # type: ignore[import-not-found,unused-ignore]

        super().finish(report, page)
        self.run.track(Text(str(report)), name="gpuwatch/report", step=report.steps)


class Callback(Tracker):
    """The user's function of a dictionary and a step, for any other tracker."""

    def __init__(self, call: Callable[[Values, int], object]) -> None:
        super().__init__(call)
        self.name = getattr(call, "__qualname__", "the function given as log")

    def log(self, values: Values, report: Report) -> None:
        self.run(values, report.steps)


class Notebook(Tracker):
    """A notebook's cell: the verdict, redrawn in place, and shown at its end by the `Session`."""

    name = "the notebook"

    def __init__(self) -> None:
        super().__init__(None)
        self.handle: Any = None  # of what is drawn in the cell that runs now

    def log(self, values: Values, report: Report) -> None:
        self.show(report)

    def show(self, report: Report) -> None:
        """Draw it in the cell that runs now: where that one has it, in place."""
        from IPython.display import display

        if self.handle is None:
            self.handle = display(report, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self.handle.update(report)


def follow_cells(shell: Any, begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], object]:
    """Call `begins` and `ends` around each later cell of a shell; cells nest. Return what ends that."""
    depth = int(any(frame.f_code.co_name == "run_cell_async" for frame, _ in walk_stack(sys._getframe())))

    def before(*_: object) -> None:
        nonlocal depth
        depth += 1
        begins()

    def after(*_: object) -> None:
        nonlocal depth
        depth = max(0, depth - 1)
        if not depth:
            ends()

    calls = {"pre_run_cell": before, "post_run_cell": after}
    for name, call in calls.items():
        shell.events.register(name, call)
    return lambda: [shell.events.unregister(name, call) for name, call in calls.items()]


def tracker_of(run: Any) -> Tracker:
    """Return how to log to a tracker's run, a SummaryWriter or a function. Raises: ConfigError for anything else."""
    if isinstance(run, Notebook):
        return run
    kinds = {"wandb": WandbRun, "mlflow": MlflowRun, "trackio": TrackioRun, "aim": AimRun}
    packages = (each.__module__.partition(".")[0] for each in type(run).__mro__)  # also of a derived class
    kind = next((kinds[package] for package in packages if package in kinds), None)
    if kind is not None:
        return kind(run)
    if hasattr(run, "add_scalar") and hasattr(run, "add_text"):
        return TensorBoardWriter(run)
    if callable(run):
        return Callback(run)
    raise ConfigError(
        f"log={run!r}: give 'auto', a run of W&B, MLflow, Trackio or Aim, a SummaryWriter, or a function of (values, step)"
    )


def active_trackers() -> list[Tracker]:
    """Return those whose run is active in this thread, of the trackers that the program has imported."""
    active: dict[str, Callable[[Any], Any]] = {
        "wandb": lambda wandb: getattr(wandb, "run", None),  # a folder of that name has none
        "mlflow": lambda mlflow: mlflow.active_run(),
        "trackio.context_vars": lambda trackio: trackio.current_run.get(),
    }
    runs = [run(sys.modules[module]) for module, run in active.items() if module in sys.modules]
    return [tracker_of(run) for run in runs if run is not None]


def find_unregistered() -> list[Tracker]:
    """Return TensorBoard writers and Aim runs, which no module knows, from all objects: 0.1 s for 200,000 of them."""
    modules = {
        "torch.utils.tensorboard.writer": "SummaryWriter",
        "tensorboardX.writer": "SummaryWriter",
        "aim.sdk.run": "Run",
    }
    kinds = [kind for module, name in modules.items() if (kind := getattr(sys.modules.get(module), name, None))]
    for kind in kinds:  # an object refers to its own class alone
        kinds += kind.__subclasses__()
    found = [each for each in gc.get_referrers(*kinds) if isinstance(each, tuple(kinds))] if kinds else []
    return [tracker_of(each) for each in found if getattr(each, "file_writer", True) is not None]  # else it is closed


class LiveLog:
    """Hands values to trackers: prepared by the background thread, taken by the training thread between steps."""

    def __init__(self, wanted: Any, report: Callable[[], Report], failed: Failed, now_ns: int) -> None:
        """`wanted` is "auto", a tracker's run or several. Raises: ConfigError for anything else."""
        given = wanted if isinstance(wanted, list | tuple) else [wanted]
        self._auto = wanted == "auto"
        self._given = [] if self._auto else [tracker_of(each) for each in given]
        self._active: list[Tracker] = []
        self._failing: list[Any] = []  # runs that are left out
        self._report, self._failed = report, failed
        is_drawn = isinstance(wanted, Notebook)
        self._interval_ns, self._pass_ns = (REDRAW_NS, REDRAW_PASS_NS) if is_drawn else (INTERVAL_NS, INTERVAL_NS)
        self._due_ns = now_ns + self._interval_ns
        self._searched: set[object] = set()
        self._logged: Report | None = None
        self.prepared: tuple[Report, Values] | None = None  # what the training thread is to hand over

    def prepare(self, now_ns: int) -> None:
        """Prepare values every 30 s. Called by the background thread, twice a second."""
        self._search()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + self._interval_ns
            report = self._report()
            if report.steps:
                values = report.metrics(since=self._logged)
                self.prepared = report, {key.replace("/", "/live/"): value for key, value in values.items()}

    def pass_ended(self, now_ns: int, is_last: bool = False) -> None:
        """Log after the first pass, a cell's last, and others if due: a tracker's run may end before the Watch does."""
        if is_last and self._logged is not None and self._logged.steps == self._report().steps:
            return
        is_due = is_last or not self._logged or now_ns >= self._due_ns - self._interval_ns + self._pass_ns
        self._due_ns = min(self._due_ns, now_ns) if is_due else self._due_ns
        self.prepare(now_ns)
        self.hand_over()

    def hand_over(self) -> None:
        """Log what was prepared, if anything was. Called by the training thread, between two steps."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            report, values = prepared
            self._logged = report
            for tracker in self._trackers():
                self._call(tracker, tracker.log, values, report)

    def finish(self, report: Report, is_first_rank: bool) -> None:
        """Log the run as it ended, and its page; takes five seconds at most."""
        self._search()
        trackers = self._trackers()
        if not trackers:
            if is_first_rank and self._auto and not self._failing:
                logger.warning(
                    "gpuwatch: log='auto' found no run of W&B, MLflow, TensorBoard, Trackio or Aim; start it before the loop, or pass it: log=run"
                )
            return
        text = report.html_page()

        def finish() -> None:
            for tracker in trackers:
                self._call(tracker, tracker.finish, report, text)

        thread = threading.Thread(target=finish, name="gpuwatch-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            finish()
            return
        thread.join(_FINISH_S)
        if thread.is_alive():
            logger.warning("gpuwatch: %s did not accept the report within %.0f s", trackers[0].name, _FINISH_S)

    def _trackers(self) -> list[Tracker]:
        """Return the trackers to log to: those given or searched for, and those active now or, if none is, before."""
        if self._auto:
            try:
                self._active = active_trackers() or self._active
            except Exception as error:
                self._failed("logging to experiment trackers", error)
        return [tracker for tracker in (*self._given, *self._active) if tracker.run not in self._failing]

    def _search(self) -> None:
        """Search for trackers that no module knows, once per new TensorBoard writer's thread, and with Aim's module."""
        if self._auto:
            try:
                threads = (each for each in threading.enumerate() if type(each).__module__.startswith("tensorboard"))
                present = {*threads, *(sys.modules.keys() & {"aim.sdk.run"})}
                if present - self._searched:
                    self._given = find_unregistered()
                self._searched = present
            except Exception as error:
                self._failed("logging to TensorBoard and Aim", error)

    def _call(self, tracker: Tracker, call: Callable[[Any, Any], None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._failing.append(tracker.run)
            self._failed(f"logging to {tracker.name}", error)
