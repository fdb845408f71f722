"""Every number in the Prometheus rules, and the price of a GPU-hour. Pure; validated when created."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError

XIDS_OF_PROGRAMS = (13, 31, 43, 45, 68)  # Of a faulty or killed program, whose log names the error: no GPU fault.


def shared(name: str) -> Any:
    """Return a field whose default is that diagnosis threshold: set once, in [thresholds]; [alerts] can differ."""
    return field(default=getattr(Thresholds, name), metadata={"shared": name})


@dataclass(frozen=True)
class AlertThresholds:
    """Every number in the rules. Durations in seconds, ratios 0–1. Raises ConfigError for a value that cannot work."""

    job: str = "gpuwatch"  # Name of the scrape job that reads the agents, or several, as `a|b`.
    runbooks: str = "http://127.0.0.1:9478/docs/runbooks"
    """URL before `/<Alert>.md` in runbook links. Alerts about a node named HOST:PORT link to its agent by default."""
    dashboards: str = "http://127.0.0.1:3000"  # URL of Grafana, for links to the run, the node or the fleet.
    ledger_window_s: float = 300  # Window of the recorded shares by GPU, run, job, user, node and fleet.
    starved_ratio: float = 0.2  # Share of training time waiting for input. A healthy loop stays at a few per cent.
    starved_window_s: float = 300
    starved_min_training_s: float = 60  # Training time that the window must hold before a share of it means anything.
    starved_for_s: float = 120  # At most window minus minimum, or training between long evaluations never fires.
    sweep_window_s: float = 600  # Runs that begin and end within it, such as trials, count together, by owner.
    sweep_runs: float = 3  # How many must have ended within three windows: as trials as long as the window do.
    sweep_for_s: float = 120
    inefficient_gpus: float = 0.25  # How many GPUs' work a finding must cost: its share of the time times the ranks.
    inefficient_for_s: float = 900
    killed_for_s: float = 0  # 0: no need to wait, because it is certain that a process was killed.
    job_wasted_ratio: float = 0.2  # Share of a job's time in interruptions: none alive, restarts, steps redone or lost.
    job_window_s: float = 86400  # Window of that share; for a younger job, its whole time.
    job_min_s: float = 3600  # Time of a job, all attempts together, from which that share means anything.
    job_wasted_for_s: float = 300
    restart_window_s: float = 1800
    restart_runs: float = 3  # How many attempts of a job must begin within the window to be a loop.
    restarts_window_s: float = 7200  # The same for a slower loop; one or two requeues are not a loop.
    restarts_runs: float = 4
    restart_for_s: float = 60
    phase_eval_s: float = 3600  # How long an evaluation may last while the GPUs are idle. A busy GPU restarts the time.
    phase_checkpoint_s: float = 1800
    phase_startup_s: float = 1800  # The same for start-up: rendezvous, NCCL's initialisation, loading a model.
    phase_other_s: float = 3600  # The same for time outside of steps and declared phases.
    phase_compile_s: float = 3600
    phase_step_s: float = 2700  # The same for a step that does not end: the first one, or where a step takes minutes.
    phase_ratio: float = 0.95  # Share of the limit to be spent in the one state. Below 1: a late scrape is no progress.
    phase_busy_ratio: float = shared("gpu_idle_utilization")  # Utilisation up to which a GPU counts as idle.
    phase_for_s: float = 60
    idle_ratio: float = 0.9  # Share of time held idle, or unused. Below 1, or one busy sample every half hour hides it.
    idle_window_s: float = 900
    idle_for_s: float = 900
    processless_for_s: float = 1800  # How long an allocated GPU may have no process: pulling images, staging data.
    stalled_ratio: float = 0.5
    stalled_window_s: float = 120
    stalled_for_s: float = 60
    hung_for_s: float = 120
    many_stalled_runs: float = 5  # How many runs must stop within the window for one alert about the site.
    many_stalled_ratio: float = 0.02  # And at least this share of all runs.
    many_stalled_window_s: float = 900
    many_stalled_for_s: float = 30  # Shorter than for the runs' own alerts, to inhibit these before they are sent.
    busy_ratio: float = shared("gpu_busy")  # Utilisation from which a GPU claims to be busy.
    busy_window_s: float = 600
    busy_for_s: float = 120
    low_power_ratio: float = 0.4  # Share of its top power in `power_window_s` below which full utilisation is no work.
    power_window_s: float = 21600  # How far back the GPU's own maximum power is searched.
    rank_pace_ratio: float = shared("rank_pace")  # Ranks whose steps differ by more are not compared: no straggler.
    straggler_ratio: float = 0.1  # Excess of a rank's own time over the faster ranks' (all nodes), by training time.
    straggler_for_s: float = 300
    straggler_across_for_s: float = 600  # Twice its window, because one long wait stays in the window.
    epoch_pause_for_s: float = 300
    shm_used_ratio: float = shared("shm_used_critical")
    shm_for_s: float = 60
    shm_forecast_window_s: float = 450  # Growth must last for two windows: a new run fills its queues once.
    shm_forecast_ahead_s: float = 3600
    shm_forecast_used_ratio: float = 0.5  # No forecast below it: workers fill /dev/shm to a level and stay.
    shm_forecast_for_s: float = 300
    throttle_reasons: str = "thermal|hardware"  # Not `power`: a fully used GPU normally reaches its power cap.
    throttled_ratio: float = shared("throttled_share")
    throttled_window_s: float = 300
    throttled_for_s: float = 300
    gpu_lost_memory_s: float = 3600  # For how long a GPU is expected after it was last listed.
    gpu_lost_for_s: float = 60
    xid_window_s: float = 300
    xid_for_s: float = 0  # 0: a single XID is enough.
    step_slower_factor: float = 1.3
    step_window_s: float = 600
    step_baseline_s: float = 21600
    step_history_s: float = 3600  # How long a run must have trained before it has a baseline.
    step_slower_for_s: float = 600
    telemetry_lost_s: float = 60  # Unexplained seconds in the window that count as lost while messages still arrive.
    telemetry_window_s: float = 300
    telemetry_for_s: float = 60
    agent_frozen_window_s: float = 120  # An agent with no new sample for so long is down. More than a scrape interval.
    agent_answers_ratio: float = 0.5  # Share of the scrapes that an agent must answer: it may keep crashing.
    agent_down_for_s: float = 60
    gone_window_s: float = 3600  # For how long to alert about a node that vanished with GPUs in use.
    keep_firing_for_s: float = 900
    """How long an alert is held when its expression goes quiet: a series that vanished is not a problem that was fixed.
    0 lets it resolve at once."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in _TEXTS:
                pattern, needed = _TEXTS[name]
                is_right, shown = re.fullmatch(pattern, value) is not None, repr(value)
            else:
                if (unit := name.rpartition("_")[2]) not in _BOUNDS:
                    units = ", ".join(_BOUNDS)
                    raise ConfigError(f"{name}: end its name with its unit, {units}, or add that to _BOUNDS")
                above, most, needed = _BOUNDS[unit]
                is_right, shown = above < value <= most or (value == 0 and name in _MAY_BE_ZERO), f"{value:g}"
            if not is_right:
                raise ConfigError(f"{name} = {shown}: {needed}")
        if self.keep_firing_for_s > 3600:
            needed = "at most 3600, or a fixed problem is shown for too long"
            raise ConfigError(f"keep_firing_for_s = {self.keep_firing_for_s:g}: {needed}")
        most_s = self.starved_window_s - self.starved_min_training_s
        if self.starved_for_s > most_s:
            needed = f"at most starved_window_s - starved_min_training_s ({most_s}), or short spells never fire"
            raise ConfigError(f"starved_for_s = {self.starved_for_s}: must be {needed}")


SHARED = {each.name: each.metadata["shared"] for each in fields(AlertThresholds) if each.metadata}
"""Thresholds of alerts that are those of the diagnosis, and their names there."""
_WORDS = (r"[\w|.:-]+", "must consist of letters, digits and |")
_URL = (r"https?://[^\s\"'{}`\\<>$]+", "must be a URL that begins with http:// or https://")
_TEXTS = {"job": _WORDS, "throttle_reasons": _WORDS, "runbooks": _URL, "dashboards": _URL}
_BOUNDS = {
    "ratio": (0, 1, "a share must be above 0 and at most 1"),
    "factor": (1, math.inf, "a factor must be above 1"),
    **dict.fromkeys(("gpus", "runs"), (0, math.inf, "must be above 0")),
    "s": (0, 1e9, "a duration in seconds must be positive and at most 1e9 (31 years)"),
}
"""By the last part of a name: (above this, at most that, what is needed)."""
_MAY_BE_ZERO = ("keep_firing_for_s", "killed_for_s", "xid_for_s")


@dataclass(frozen=True)
class Prices:
    """What a GPU-hour costs. Raises ConfigError for a price that cannot be."""

    gpu_hour: float | None = None  # Price for models that are not in `models`. None: costs are in GPU-hours only.
    currency: str = "USD"
    models: Mapping[str, float] = field(default_factory=dict)  # By the driver's model name: {"NVIDIA H200": 4.2}.
    kwh: float | None = None  # Price of the GPUs' energy; shown with the energy, not included in other costs.

    def __post_init__(self) -> None:
        own = {name: price for name in ("gpu_hour", "kwh") if (price := getattr(self, name)) is not None}
        for name, price in {**own, **self.models}.items():
            if not 0 < price < math.inf:
                what = "kWh" if name == "kwh" else "GPU-hour"
                raise ConfigError(f"{name} = {price!r}: the price of a {what} must be a finite number above 0")
        if (self.models or self.kwh) and self.gpu_hour is None:
            raise ConfigError("gpu_hour is missing: it is the price of GPUs whose model is not listed")
        if not re.fullmatch(r"[^\s\"'{}`\\<>]{1,8}", self.currency):
            raise ConfigError(f"currency = {self.currency!r}: give a code or a sign, e.g. EUR")
        for model in self.models:
            if re.search(r"[\"'{}`\\<>\n]", model):
                raise ConfigError(f"models: {model!r} has a character that no model name has")

    def hourly(self, models: Iterable[str], share: float = 1.0) -> list[float]:
        """Return the price of an hour of this share of each GPU, for MIG by compute slices; [] without any."""
        return [] if self.gpu_hour is None else [share * self._hour(model, self.gpu_hour) for model in models]

    def _hour(self, name: str, otherwise: float) -> float:
        model, _, profile = name.partition(" MIG ")  # "NVIDIA A30 MIG 2g.12gb", "… MIG 1c.3g.40gb"
        slices = re.match(r"(\d+)[cg]\.", profile)
        of = 4 if re.search(r"\bA30\b|\bRTX PRO\b", model) else 7
        return self.models.get(model, otherwise) * (int(slices[1]) / of if slices else 1)
