"""A Prometheus that holds a day of a made-up fleet, as the rules record it: promtool writes it, so no test waits."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.ledger.states import GPU_STATES
from tests.servers import require

EVERY_S = 300
LOST_FOR_S = 7200.0
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Share:
    """GPUs of one run on one node, and which part of their time is of which kind."""

    node: str
    user: str
    job: str
    run: str
    gpus: float
    starved: float = 0.0
    idle: float = 0.0
    stalled: float = 0.0
    cause: str = ""
    """The largest finding of its run."""

    @property
    def kinds(self) -> dict[str, float]:
        """Return GPUs' worth of time by kind."""
        lost = {"starved": self.starved, "idle": self.idle, "stalled": self.stalled}
        useful = 0.95 * (1.0 - sum(lost.values()))
        return {"all": self.gpus, "useful": useful * self.gpus} | {
            kind: part * self.gpus for kind, part in lost.items()
        }


def recorded(shares: list[Share], price: float | None = None, silent: Sequence[str] = ()) -> Series:
    """Return every series' value, which never changes. `price`: of a GPU-hour; `silent`: nodes that do not answer."""
    series: Series = {}

    def add(name: str, value: float, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        series[key] = series.get(key, 0.0) + value

    for share in shares:
        owner = {"instance": share.node, "user": share.user, "job_id": share.job, "run": share.run}
        for kind, gpus in share.kinds.items():
            add("owner_kind:gpuwatch_gpu_seconds:rate", gpus, kind=kind, **owner)
            add("owner_kind:gpuwatch_gpu_hours:increase", gpus * EVERY_S / 3600, kind=kind, **owner)
            if price is not None:
                add("owner_kind:gpuwatch_gpu_cost:per_hour", price * gpus, kind=kind, **owner)
                add("owner_kind:gpuwatch_gpu_cost:increase", price * gpus * EVERY_S / 3600, kind=kind, **owner)
            if kind not in ("all", "useful") and gpus:
                add("owner_kind:gpuwatch_gpu_lost_since:timestamp", time.time() - LOST_FOR_S, kind=kind, **owner)
        for gpu in range(int(share.gpus)):
            index = str(
                sum(name == "gpuwatch_gpu_owner_info" and ("instance", share.node) in of for name, of in series)
            )
            add("gpuwatch_gpu_owner_info", 1.0, gpu=index, UUID=f"GPU-{share.run}-{gpu}", **owner)
        if share.cause:
            add("gpuwatch_finding_evidence_ratio", 0.5, run=share.run, cause=share.cause)
            add("gpuwatch_finding_evidence_ratio", 0.3, run=share.run, cause="host_bound")
            add("gpuwatch_finding_info", 1.0, run=share.run, cause=share.cause, advice=f"mend {share.cause}")
            add("gpuwatch_finding_info", 1.0, run=share.run, cause="host_bound", advice="mend another thing")
        states = "owner_state:gpuwatch_gpu_seconds:rate"
        by_state = {"input_wait": "starved", "held_idle": "idle", "stalled": "stalled", "compute": "useful"}
        for state in GPU_STATES:
            if state in by_state:
                add(states, share.kinds[by_state[state]], state=state, **owner)
        rest = share.gpus - sum(gpus for kind, gpus in share.kinds.items() if kind != "all")
        add(states, rest, state="other", **owner)
    if price is not None:
        add("site:gpuwatch_currency:info", 1.0, currency="EUR")
    for node in silent:
        add("up", 0.0, job="gpuwatch", instance=node)
    return series


def write_blocks(
    series: Series, hours: float, folder: Path, ahead_s: int = 0, ago_s: int = 0, drawn: bool = False
) -> None:
    """Write the series over the last hours, up to `ago_s` ago, into a Prometheus store, with promtool.

    The folder must not exist yet. Series of which only the last value is read go on for `ahead_s` more, for a store
    that takes long to write. `drawn`: their past is written too.
    """
    text = folder.parent / "recorded.om"
    now = int(time.time()) - ago_s
    times = range(now - int(hours * 3600), now + 1, EVERY_S)
    with text.open("w") as file:
        file.writelines(_lines(series, times, range(times[0] if drawn else now - 600, now + ahead_s + 1, 60)))
    promtool = require("promtool")
    done = subprocess.run(
        [
            promtool,
            "tsdb",
            "create-blocks-from",
            f"--max-block-duration={max(2, int(hours))}h",
            "openmetrics",
            str(text),
            str(folder),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text.unlink()


def _lines(series: Series, times: range, now: range) -> Iterator[str]:
    """Yield the text, a series a chunk: a week of a thousand nodes has 17 million lines."""
    reported = ""
    all_times, now_times = [[f" {time_s}\n" for time_s in each] for each in (times, now)]
    for (name, labels), value in sorted(series.items()):
        if name != reported:
            yield f"# TYPE {name} gauge\n"
            reported = name
        text = ",".join(f'{label}="{of}"' for label, of in labels)
        # Of the others only the last value is read.
        of_now = not name.endswith((":increase", "owner_state:gpuwatch_gpu_seconds:rate"))
        head = f"{name}{{{text}}} {value}"
        yield head + head.join(now_times if of_now else all_times)
    yield "# EOF\n"
