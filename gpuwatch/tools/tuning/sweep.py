"""The order of trials: workers 0, 1, 2, 4, 8 …, then in between, then the other options. Measuring is injected."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpuwatch.errors import ConfigError
from gpuwatch.formatting import duration
from gpuwatch.tools.tuning import choose
from gpuwatch.tools.tuning.result import SETTINGS, Failed, LeftOut, Measured, Room, Row, Setting, TuneResult, measured
from gpuwatch.tools.tuning.trial import Plan

PREFETCH = 2  # DataLoader's default, used while the number of workers varies
_REFINEMENTS = 4
_INTERRUPTED = "interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; `result` is what was measured so far, None if nothing was."""

    def __init__(self, result: TuneResult | None) -> None:
        super().__init__()
        self.result = result


@dataclass
class Sweep:
    """One pass through the settings. `progress` is called with each new row."""

    measure: Callable[[Setting, Plan], Measured | Failed]
    room: Callable[[], Room]
    progress: Callable[[Row], None]
    cores: int
    step_s: float | None  # a training step without any wait; None: find the fastest setting
    budget_s: float = 60.0
    max_workers: int | None = None
    ranks: int = 1  # training processes of the node that share its cores, memory and /dev/shm
    name: str = "make_loader"
    takes: frozenset[str] = SETTINGS
    clock: Callable[[], float] = time.monotonic
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    def __post_init__(self) -> None:
        self.begun_s, self.start = self.clock(), self.room()

    def run(self) -> TuneResult:
        """Return the result. Raises: ConfigError where no setting runs; Interrupted on Ctrl-C."""
        try:
            self._ladder()
            self._refine()
            best = choose.choose(self.rows, self.step_s)
            if best is not None:
                best = self._prefetch(best)
                return self._result(best, self._options(best))
        except KeyboardInterrupt:
            self.stopped = _INTERRUPTED
            best = choose.choose(self.rows, self.step_s)
            raise Interrupted(self._result(best, best.setting) if best else None) from None
        failure = next((row for row in self.rows if isinstance(row, Failed)), None)
        if failure is not None and failure.kind == "no_loader":
            raise ConfigError(failure.text)
        what = self.stopped if failure is None else failure.text
        raise ConfigError(
            f"{self.name}: the loader fails with every setting tried: {what}; "
            "take one batch from it without gpuwatch to see more"
        )

    def _try(self, setting: Setting) -> Row:
        """Try a setting unless a forecast, or the budget, forbids it."""
        for known in self.rows:
            if known.setting == setting and isinstance(known, LeftOut):
                return known
        budget_s, needs_s = self.budget_s, self._needs_s(setting)
        remaining_s = budget_s - (self.clock() - self.begun_s)
        row: Row | None = choose.left_out(setting, self.rows, self.room(), self.ranks)
        if row is None and self.rows and remaining_s < needs_s:
            row = LeftOut(setting, "budget", f"the budget of {duration(budget_s)} is used up")
        if row is None:
            measure_s = min(2.0, max(0.3, budget_s / 20))
            limit_s = min(remaining_s, max(budget_s / 3, 3 * needs_s))
            row = self.measure(setting, Plan(measure_s, limit_s, seed=len(self.rows)))
        self.rows.append(row)
        self.progress(row)
        return row

    def _needs_s(self, setting: Setting) -> float:
        """Return the least duration of a trial: start, prefetched batches, three cycles."""
        done = measured(self.rows)
        start = done[-1].make_s + done[-1].first_batch_s if done else 0.0
        return 0.3 + start + (choose.fetch_s(done) or 0.0) * ((setting.prefetch_factor or 0) + 3)

    def _ladder(self) -> None:
        workers = 0
        while True:
            row = self._try(_setting(workers))
            if isinstance(row, LeftOut) and row.limit in ("shm", "memory") and "prefetch_factor" in self.takes:
                row = self._try(Setting(workers, 1))
            if self._over(row):
                return
            bound, limit, reason = choose.most_workers(self.rows, self.cores, self.max_workers)
            following = 2 * workers if workers else 1
            if min(following, bound) <= workers:
                self.rows.append(LeftOut(_setting(following), limit, reason))
                self.stopped = reason
                return
            workers = min(following, bound)

    def _over(self, row: Row) -> bool:
        """Return whether to stop before larger settings, and record why."""
        if isinstance(row, LeftOut):
            self.stopped = choose.reason(row)
        elif isinstance(row, Failed):
            if row.kind in ("error", "timeout") and row.setting.num_workers == 0:  # it may run with workers
                return False
            self.stopped = f"{row.setting} failed: {row.text}"
        elif self.step_s is not None and choose.feeds(row, self.step_s):
            self.stopped = f"{row.setting} feeds the step"
        elif choose.saturated(measured(self.rows), self.step_s):
            self.stopped = "two more settings gained less than 5%"
        else:
            return False
        return True

    def _refine(self) -> None:
        """Find the smallest number of workers that is enough, between the last that is not and the first that is."""
        for _ in range(_REFINEMENTS):
            best = choose.choose(self.rows, self.step_s)
            if best is None:
                return
            done, high = measured(self.rows), best.setting.num_workers
            low = max((row.setting.num_workers for row in self.rows if row.setting.num_workers < high), default=high)
            if high - low <= 1:
                return
            enough_s = min(row.batch_s for row in done) * (1 + choose.WORTH)
            wanted_s = enough_s if self.step_s is None else choose.SPARE * self.step_s
            guess = -int(-(choose.fetch_s(done) or 0.0) // wanted_s)
            between = replace(best.setting, num_workers=min(high - 1, max(low + 1, guess)))
            if isinstance(self._try(between), LeftOut):
                return

    def _options(self, best: Measured) -> Setting:
        """Vary the options that make no batches; return the setting to choose."""
        setting = best.setting
        if best.copy_s is not None and "pin_memory" in self.takes:
            row = self._try(replace(setting, pin_memory=True))
            if isinstance(row, Measured) and row.copy_s is not None and row.copy_s < 0.9 * best.copy_s:
                setting = row.setting
                self.notes.append(f"pin_memory: a copy to the GPU {duration(best.copy_s)} → {duration(row.copy_s)}")
        if setting.num_workers and "persistent_workers" in self.takes:
            row = self._try(replace(setting, persistent_workers=True))
            if isinstance(row, Measured) and row.second_first_batch_s is not None:
                again, first = row.second_first_batch_s, row.first_batch_s
                if again < 0.8 * first and first - again >= 0.01:
                    setting = row.setting
                    gain = f"after {duration(again)} instead of {duration(first)}"
                    self.notes.append(f"persistent_workers: the first batch of a later pass {gain}")
        return setting

    def _prefetch(self, best: Measured) -> Measured:
        """Return the result of a larger prefetch_factor where that gains 5%, else that of the setting given."""
        current = best
        while "prefetch_factor" in self.takes and 0 < (factor := current.setting.prefetch_factor or 0) < 8:
            row = self._try(replace(current.setting, prefetch_factor=2 * factor))
            if not isinstance(row, Measured) or not choose.faster(row, current):
                break
            if self.step_s is not None and choose.feeds(current, self.step_s):
                break
            current = row
        if current is not best:
            gain = f"a batch every {duration(best.batch_s)} → {duration(current.batch_s)}"
            self.notes.append(f"prefetch_factor={current.setting.prefetch_factor}: {gain}")
        return current

    def _result(self, chosen: Measured, setting: Setting) -> TuneResult:
        """Return the result: a setting that makes batches as fast as the one that was measured."""
        memory, shm = (self.start[what][0] if what in self.start else None for what in ("memory", "/dev/shm"))
        return TuneResult(
            rows=tuple(self.rows),
            chosen=setting,
            feeds=None if self.step_s is None else choose.feeds(chosen, self.step_s),
            why=choose.why(self.rows, chosen, self.step_s, self.cores, self.stopped == _INTERRUPTED),
            step_s=self.step_s,
            cores=self.cores,
            stopped=self.stopped,
            notes=(*self.notes, *choose.warnings(self.rows, chosen, self.cores)),
            elapsed_s=self.clock() - self.begun_s,
            facts={"memory_available_bytes": memory, "shm_free_bytes": shm},
        )


def _setting(workers: int) -> Setting:
    return Setting(workers, PREFETCH if workers else None)
