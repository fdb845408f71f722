"""What is logged to experiment trackers, by fakes that have the trackers' own interfaces.

tests/integration/integrations/test_trackers.py has the real ones.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpuwatch
from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import Report, make_report
from gpuwatch.errors import ConfigError
from gpuwatch.hook import trackers
from gpuwatch.hook.trackers import INTERVAL_NS, LiveLog, TensorBoardWriter, find_unregistered, tracker_of
from tests.unit.hook.fakes import Clock, fake_watch
from tests.unit.rules.windows import steps, window

SECOND = 1_000_000_000
SENTENCE = "input-bound: 60% of the time training waited for data"


def report(count: int, wait_s: float = 0.06, compute_s: float = 0.04) -> Report:
    columns = steps(count, wait_s, compute_s)
    done = Done(seconds=count * (wait_s + compute_s), steps=count, samples=32 * count)
    return make_report(window(columns), done, run="id", name="resnet <50>")


class Run:
    """Records every call, with its thread."""

    def __init__(self, module: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.id, self.info, self.summary = "abc", SimpleNamespace(run_id="r1"), _Summary(self)
        self.__class__ = type(self.__class__.__name__, (self.__class__,), {"__module__": module})

    def note(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class _Summary(dict[str, Any]):
    def __init__(self, run: Run) -> None:
        super().__init__()


class Wandb(Run):
    def log(self, values: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        self.note("log", values, step, commit)

    def log_artifact(self, artifact: Any) -> None:
        self.note("log_artifact", artifact)


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.files = name, type, dict[str, list[str]]()

    @contextmanager
    def new_file(self, name: str) -> Any:
        yield SimpleNamespace(write=self.files.setdefault(name, []).append)


class Client:
    """MLflow's."""

    run: Run

    def log_batch(self, run_id: str, metrics: Any = (), synchronous: bool | None = None) -> None:
        self.run.note("log_batch", run_id, {each.key: (each.value, each.step) for each in metrics}, synchronous)

    def set_tag(self, run_id: str, key: str, value: str, synchronous: bool | None = None) -> None:
        self.run.note("set_tag", run_id, key, value, synchronous)

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.run.note("log_text", run_id, text, artifact_file)


class Writer(Run):
    """A SummaryWriter."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.note("add_scalar", tag, value, global_step)

    def add_text(self, tag: str, text: str, global_step: int) -> None:
        self.note("add_text", tag, text, global_step)

    def flush(self) -> None:
        self.note("flush")


class Trackio(Run):
    def log(self, values: dict[str, Any]) -> None:
        self.note("log", values)


class Aim(Run):
    def track(self, value: Any, name: str | None = None, step: int | None = None) -> None:
        self.note("track", value, name, step)

    def __setitem__(self, key: str, value: str) -> None:
        self.note("set", key, value)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module: Any = ModuleType("wandb")
    module.run, module.Artifact = Wandb("wandb.sdk.wandb_run"), Artifact
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module.run


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run("mlflow.tracking.fluent")
    module: Any = ModuleType("mlflow")
    entities: Any = ModuleType("mlflow.entities")
    module.active_run, module.MlflowClient = lambda: run, type("MlflowClient", (Client,), {"run": run})
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return run


@pytest.fixture
def failures() -> list[tuple[str, BaseException]]:
    return []


@pytest.fixture
def live(failures: list[tuple[str, BaseException]]) -> Callable[..., tuple[LiveLog, list[Report]]]:
    """Make a log whose reports are those in the list that comes with it."""

    def make(wanted: Any) -> tuple[LiveLog, list[Report]]:
        reports: list[Report] = [report(100)]
        log = LiveLog(wanted, lambda: reports[-1], lambda doing, error: failures.append((doing, error)), 0)
        return log, reports

    return make


Make = Callable[[Any], tuple[LiveLog, list[Report]]]


def test_values_are_prepared_every_30_s_and_handed_over_once(live: Make) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    log, reports = live(lambda values, step: logged.append((values, step)))
    log.prepare(INTERVAL_NS - 1)
    assert log.prepared is None
    log.prepare(INTERVAL_NS)
    assert logged == [], "the background thread logs nothing itself"
    log.hand_over()
    log.hand_over()
    assert len(logged) == 1 and logged[0][1] == 100
    assert logged[0][0]["gpuwatch/live/input_wait_ratio"] == pytest.approx(0.6)
    reports.append(report(300, 0.02, 0.08))
    log.prepare(2 * INTERVAL_NS - 1)
    assert log.prepared is None
    log.prepare(2 * INTERVAL_NS)
    log.hand_over()
    values, step = logged[1]
    assert step == 300 and values["gpuwatch/live/input_wait_ratio"] == pytest.approx(0.0)
    assert values["gpuwatch/live/steps"] == 200 and values["gpuwatch/live/step_s"] == pytest.approx(0.1)
    assert values["gpuwatch/live/samples_per_s"] == pytest.approx(320.0)


def test_a_training_that_takes_no_step_for_long_logs_all_of_it_at_the_next(live: Make) -> None:
    logged: list[dict[str, float]] = []
    log, reports = live(lambda values, step: logged.append(values))
    for tick in (1, 2, 3):
        log.prepare(tick * INTERVAL_NS)
        reports.append(report(100 + 10 * tick))
    log.hand_over()
    assert [values["gpuwatch/live/steps"] for values in logged] == [120]


def test_no_value_is_logged_before_the_first_step(live: Make) -> None:
    log, reports = live(lambda values, step: pytest.fail("logged"))
    reports.append(make_report(window(steps(0, 0, 0), states_s={"startup": 3.0}), Done(0.0, 0), run="id", name="name"))
    log.prepare(INTERVAL_NS)
    assert log.prepared is None


def test_wandb_keeps_its_step_and_has_the_whole_run_in_its_summary(live: Make, wandb: Wandb) -> None:
    log, _ = live("auto")
    log.prepare(INTERVAL_NS)
    log.hand_over()
    (call,) = wandb.named("log")
    assert call[1]["gpuwatch/live/compute_ratio"] == pytest.approx(0.4)
    assert call[2:] == (None, False), "a committed row would advance the program's own step"
    assert wandb.summary["gpuwatch/verdict"] == SENTENCE and wandb.summary["gpuwatch/steps"] == 100
    log.finish(report(200), True)
    assert wandb.summary["gpuwatch/steps"] == 200
    (artifact,) = wandb.named("log_artifact")
    assert (artifact[1].name, artifact[1].type) == ("gpuwatch-report-abc", "report")
    page = "".join(artifact[1].files["gpuwatch-report.html"])
    assert "resnet &lt;50&gt;" in page and "<script" not in page and SENTENCE in page


def test_mlflow_does_not_wait_between_two_steps(live: Make, mlflow: Run) -> None:
    log, _ = live("auto")
    log.prepare(INTERVAL_NS)
    log.hand_over()
    assert [call[-1] for call in mlflow.calls] == [False, False], "synchronous=False"
    assert mlflow.calls[0][2]["gpuwatch/live/step_s"] == (pytest.approx(0.1), 100)
    assert mlflow.calls[0][2]["gpuwatch/step_s"] == (pytest.approx(0.1), 100), "of the run so far"
    assert mlflow.calls[1][1:4] == ("r1", "gpuwatch/verdict", SENTENCE)
    log.finish(report(200), True)
    batch, tag, text = mlflow.calls[2:]
    assert batch[2]["gpuwatch/steps"] == (200.0, 200) and tag[3] == SENTENCE
    assert text[1] == "r1" and text[3] == "gpuwatch-report.html" and text[2].startswith("<!doctype html>")


def test_a_run_that_has_ended_before_the_watch_still_gets_the_report(
    live: Make, mlflow: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = live("auto")
    log.prepare(INTERVAL_NS)
    log.hand_over()
    monkeypatch.setattr(sys.modules["mlflow"], "active_run", lambda: None)
    log.finish(report(200), True)
    assert mlflow.named("log_text")


def test_tensorboard_by_its_writer(live: Make) -> None:
    writer = Writer("torch.utils.tensorboard.writer")
    log, _ = live(writer)
    log.prepare(INTERVAL_NS)
    log.hand_over()
    assert ("add_scalar", "gpuwatch/live/steps", 100.0, 100) in writer.calls
    log.finish(report(200), True)
    assert ("add_text", "gpuwatch/verdict", SENTENCE, 200) in writer.calls
    texts = [text for _, tag, text, _ in writer.named("add_text") if tag == "gpuwatch/report"]
    assert all(line.startswith("    ") for line in texts[0].splitlines()) and writer.calls[-1] == ("flush",)


def test_trackio_and_aim(live: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio, aim = Trackio("trackio.run"), Aim("aim.sdk.run")
    module: Any = ModuleType("aim")
    module.Text = lambda text: f"Text({text[:8]})"
    monkeypatch.setitem(sys.modules, "aim", module)
    log, _ = live([trackio, aim])
    log.prepare(INTERVAL_NS)
    log.hand_over()
    assert trackio.calls[0][1]["gpuwatch/verdict"] == SENTENCE
    assert aim.calls[0][3] == 100 and aim.calls[1] == ("set", "gpuwatch/verdict", SENTENCE)
    log.finish(report(200), True)
    assert trackio.calls[-1][1]["gpuwatch/steps"] == 200
    assert aim.calls[-1] == ("track", "Text(gpuwatch)", "gpuwatch/report", 200)


def test_a_folder_called_wandb_hides_no_other_tracker(monkeypatch: pytest.MonkeyPatch, mlflow: Run) -> None:
    """W&B leaves such a folder behind; where W&B is not installed, `try: import wandb` gives an empty namespace."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.delitem(sys.modules, "trackio.context_vars", raising=False)
    assert [each.name for each in trackers.active_trackers()] == ["MLflow"]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    live: Make, failures: list[tuple[str, BaseException]]
) -> None:
    logged: list[int] = []

    def broken(values: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    log, _ = live([broken, lambda values, step: logged.append(step)])
    for tick in (1, 2):
        log.prepare(tick * INTERVAL_NS)
        log.hand_over()
    log.finish(report(200), True)
    assert logged == [100, 100, 200]
    assert len(failures) == 1 and failures[0][0].startswith("logging to ") and str(failures[0][1]) == "disk full"


def test_a_server_that_does_not_answer_delays_the_end_by_no_more_than_its_limit(
    live: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_FINISH_S", 0.05)
    hangs = threading.Event()
    log, _ = live(lambda values, step: hangs.wait(20))
    with caplog.at_level(logging.WARNING):
        log.finish(report(100), True)
    hangs.set()
    assert "did not accept the report" in caplog.text


@pytest.mark.parametrize(("is_first_rank", "output"), [(True, 1), (False, 0)])
def test_a_run_without_a_tracker_is_reported_once(
    live: Make, caplog: pytest.LogCaptureFixture, is_first_rank: bool, output: int
) -> None:
    log, _ = live("auto")
    log.finish(report(100), is_first_rank)
    assert caplog.text.count("found no run of W&B") == output


def test_a_pass_s_end_logs_at_once_and_later_ones_only_when_values_are_due(live: Make) -> None:
    logged: list[int] = []
    log, reports = live(lambda values, step: logged.append(step))
    log.pass_ended(1)
    reports.append(report(150))
    log.pass_ended(2)
    assert logged == [100]
    reports.append(report(300))
    log.pass_ended(3 * INTERVAL_NS)
    assert logged == [100, 300]


def test_a_run_that_ends_after_the_first_pass_has_its_values(wandb: Wandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpuwatch.watch(loader)` ends with the process, after `wandb.finish()`."""
    watch = gpuwatch.Watch(quiet=True, log="auto")
    for _ in watch.steps([1, 2, 3]):
        pass
    assert wandb.summary["gpuwatch/steps"] == 3 and wandb.named("log")
    monkeypatch.setattr(sys.modules["wandb"], "run", None)
    watch.close()


def test_a_tracker_that_failed_is_not_said_to_be_missing(live: Make, caplog: pytest.LogCaptureFixture) -> None:
    def broken(values: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    log, _ = live(broken)
    log.prepare(INTERVAL_NS)
    log.hand_over()
    log.finish(report(100), True)
    assert "found no run" not in caplog.text


def test_what_is_no_tracker_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="log=7: give 'auto', a run of W&B"):
        tracker_of(7)
    with pytest.raises(ConfigError, match="log='wandb'"):
        gpuwatch.Watch(log="wandb")


def test_the_writers_of_tensorboard_are_searched_once_for_each_of_its_threads(
    live: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SummaryWriter(Writer):
        def __init__(self) -> None:
            self.calls, self.threads, self.file_writer = [], set(), object()

    module: Any = ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    searches: list[object] = []
    search = trackers.find_unregistered
    monkeypatch.setattr(trackers, "find_unregistered", lambda: searches.append(1) or search())
    log, _ = live("auto")
    writer, closed = SummaryWriter(), SummaryWriter()
    closed.file_writer = None
    log.prepare(1)
    assert searches == [], "no thread of TensorBoard lives"
    thread_class = type("_AsyncWriterThread", (threading.Thread,), {"__module__": "tensorboard.summary.writer"})
    ends = threading.Event()
    thread = thread_class(target=ends.wait)
    thread.start()
    try:
        for now_ns in (2, 3, INTERVAL_NS):
            log.prepare(now_ns)
        log.hand_over()
        assert (
            closed.calls == []
            and len(searches) == 1
            and ("add_scalar", "gpuwatch/live/steps", 100.0, 100) in writer.calls
        )
    finally:
        ends.set()
        thread.join()
    log.finish(report(200), True)
    assert len(searches) == 1 and writer.calls[-1] == ("flush",), "it is kept, and takes values after it was closed"


def test_a_training_hands_over_in_its_own_thread_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the background thread prepares, the training thread logs, the end has the whole run."""
    monkeypatch.setattr("gpuwatch.hook.trackers.INTERVAL_NS", SECOND // 10)
    threads: list[str] = []
    values: list[dict[str, float]] = []

    def log(found: dict[str, float], step: int) -> None:
        threads.append(threading.current_thread().name)
        values.append(found)

    live_logged = threading.Event()

    def batches() -> Any:
        for number in range(100_000):
            if number % 8 == 0:
                live_logged.wait(0.02)
            if values:
                return
            yield number

    with gpuwatch.Watch(quiet=True, log=log) as watch:
        for _ in watch.steps(batches()):
            pass
    assert threads[0] == threading.main_thread().name and "gpuwatch/live/steps" in values[0]
    assert "gpuwatch/steps" in values[-1] and threads[-1] == "gpuwatch-log"


def test_without_a_log_nothing_is_called_after_a_batch() -> None:
    watch = gpuwatch.Watch(quiet=True)
    assert not watch.session.publisher.live
    watch.close()


def test_the_variable_asks_for_auto(monkeypatch: pytest.MonkeyPatch, wandb: Wandb) -> None:
    monkeypatch.setenv("GPUWATCH_LOG", "auto")
    with gpuwatch.Watch(quiet=True) as watch:
        for _ in watch.steps([1, 2, 3]):
            pass
    assert wandb.named("log_artifact") and wandb.summary["gpuwatch/steps"] == 3


class Kernel:
    """A notebook: the outputs below its cells, as IPython.display makes and updates them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cells: list[list[str]] = []
        self.kernel, self.calls = object(), {}
        self.events = SimpleNamespace(
            register=self.calls.__setitem__, unregister=lambda name, call: self.calls.pop(name)
        )
        ipython: Any = ModuleType("IPython")
        ipython.get_ipython = lambda: self
        ipython.display = ModuleType("IPython.display")
        ipython.display.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)

    def display(self, shown: Any, display_id: bool) -> Any:
        assert display_id
        cell = [shown._repr_html_()]
        self.cells.append(cell)
        return SimpleNamespace(update=lambda now: cell.append(now._repr_html_()))


def test_a_notebook_s_verdict_is_redrawn_in_the_cell_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr(trackers, "REDRAW_NS", SECOND // 20)

    def batches() -> Any:
        for number in range(100_000):
            if number % 8 == 0:
                threading.Event().wait(0.02)
            if kernel.cells and len(kernel.cells[-1]) > 1:
                return
            yield number

    watch = gpuwatch.Watch()
    for _ in watch.steps(batches()):
        pass
    assert len(kernel.cells) == 1 and len(kernel.cells[0]) > 1
    kernel.calls["post_run_cell"]("result")
    kernel.calls["pre_run_cell"]("info")
    watch.close()
    assert not kernel.calls
    shown = kernel.cells[-1][-1]
    assert "waited for data" in shown and "waiting for data" in shown and "gpuwatch ·" not in capsys.readouterr().err


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "callback"])
def test_what_trains_between_two_cells_is_recorded(monkeypatch: pytest.MonkeyPatch, in_thread: bool) -> None:
    kernel, clock = Kernel(monkeypatch), Clock()
    watch = fake_watch(clock, monkeypatch)

    def train() -> None:
        for _ in watch.steps(range(20)):
            clock.sleep_ms(10)

    train()
    kernel.calls["post_run_cell"]("result")
    clock.sleep_ms(300)
    if in_thread:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
    clock.sleep_ms(100)
    kernel.calls["pre_run_cell"]("info")
    train()
    report = watch.report()
    watch.close()
    assert report.steps == 60 and report.phases == {"between cells": pytest.approx(0.3)}, "the next steps end it"
    assert report.states == pytest.approx({"compute": 0.6, "other": 0.4})


def test_a_terminal_of_ipython_and_a_quiet_watch_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    for quiet in (True, False):
        with gpuwatch.Watch(quiet=quiet) as watch:
            for _ in watch.steps([1, 2, 3]):
                pass
        kernel.kernel = None
    assert kernel.cells == []


def test_the_time_between_cells_is_excluded_where_no_cell_has_opened_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell after it counted as one inside another: the time between cells was "outside of training steps"."""
    kernel, clock = Kernel(monkeypatch), Clock()
    watch = fake_watch(clock, monkeypatch)

    def train() -> None:
        for _ in watch.steps(range(20)):
            clock.sleep_ms(10)

    for _ in range(2):
        kernel.calls["pre_run_cell"]("info")
        train()
        kernel.calls["post_run_cell"]("result")
        clock.sleep_ms(300)
    kernel.calls["pre_run_cell"]("info")
    report = watch.report()
    watch.close()
    assert report.steps == 40 and report.phases == {"between cells": pytest.approx(0.6)}
    assert report.states == pytest.approx({"compute": 0.4, "other": 0.6})


def test_a_cell_inside_the_cell_that_has_opened_the_watch_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds today, and has to hold with the mend. (The function has the name of IPython's, which is on the stack.)"""
    kernel, clock, watches = Kernel(monkeypatch), Clock(), list[Any]()

    def run_cell_async() -> None:
        watches.append(fake_watch(clock, monkeypatch))
        kernel.calls["pre_run_cell"]("inner")
        kernel.calls["post_run_cell"]("inner")
        for _ in watches[0].steps(range(2)):
            clock.sleep_ms(10)
        clock.sleep_ms(100)

    run_cell_async()
    report = watches[0].report()
    watches[0].close()
    assert report.steps == 2 and report.phases == {}


def test_a_writer_derived_from_torch_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "log='auto' found no run of W&B, MLflow, TensorBoard, Trackio or Aim"."""

    class SummaryWriter:
        def __init__(self) -> None:
            self.file_writer = object()

        def add_scalar(self, tag: str, value: float, global_step: int) -> None: ...

        def add_text(self, tag: str, text: str, global_step: int) -> None: ...

    class Corrected(SummaryWriter):
        pass

    class MoreCorrected(Corrected):
        pass

    module: Any = ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    writers = {SummaryWriter(), Corrected(), MoreCorrected()}
    found = [each for each in find_unregistered() if isinstance(each.run, SummaryWriter)]
    assert {each.run for each in found} == writers and len(found) == 3
    assert all(isinstance(each, TensorBoardWriter) for each in found)
