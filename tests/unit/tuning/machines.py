"""A machine with a known loader, measured at once: what a sweep sees when nothing is noisy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.tools.tuning.result import Failed, Measured, Room, Setting, TuneResult, Usage
from gpuwatch.tools.tuning.sweep import Sweep
from gpuwatch.tools.tuning.trial import Plan

MIB = 1024**2
GIB = 1024**3


@dataclass
class Machine:
    """A loader whose fetch takes `fetch_s`, `cpu` of it on a core; and a machine of so many cores and bytes."""

    fetch_s: float
    cpu: float = 0.02
    cores: int = 4
    memory_bytes: int = 32 * GIB
    shm_bytes: int = 16 * GIB
    batch_bytes: int = MIB
    worker_bytes: int = 50 * MIB
    trial_s: float = 2.0
    ceiling_s: float = 0.0
    """A batch cannot come faster: storage, a lock."""
    fails: Callable[[Setting], Failed | None] = lambda setting: None
    copy_s: Callable[[Setting], float | None] = lambda setting: None
    second_first_batch_s: float = 0.5
    main_cpu: float = 0.05
    """Of a core, with workers."""
    prefetch_gain: float = 1.0
    """Factor on the time between batches for each doubling of prefetch_factor."""
    others_cores: float = 0.0
    now_s: float = 0.0
    tried: list[Setting] = field(default_factory=list)

    def batch_s(self, setting: Setting) -> float:
        workers = max(1, setting.num_workers)
        doublings = {1: -1, 2: 0, 4: 1, 8: 2}.get(setting.prefetch_factor or 2, 0)
        bound = self.fetch_s * self.cpu / self.cores
        return float(max(self.fetch_s / workers * self.prefetch_gain**doublings, bound, self.ceiling_s))

    def measure(self, setting: Setting, plan: Plan) -> Measured | Failed:
        self.tried.append(setting)
        assert plan.limit_s > 0
        self.now_s += min(self.trial_s, plan.limit_s)
        failed = self.fails(setting)
        if failed is not None:
            return failed
        batch_s = self.batch_s(setting)
        cores = self.fetch_s * self.cpu / batch_s
        workers = setting.num_workers
        return Measured(
            setting=setting,
            make_s=0.01,
            first_batch_s=0.5 + self.fetch_s,
            batch_s=batch_s,
            spread_ratio=0.02,
            batches=50,
            batch_bytes=self.batch_bytes,
            shared_bytes=self.batch_bytes,
            cpu_cores=cores,
            others_cores=self.others_cores,
            main_cpu_ratio=self.main_cpu if workers else cores,
            cpu_demand_ratio=min(1.0, cores / max(1, workers)),
            worker_cpu_ratio=cores / workers if workers else None,
            second_first_batch_s=self.second_first_batch_s if setting.persistent_workers else None,
            copy_s=self.copy_s(setting),
            usage=Usage(
                main_rss_bytes=300 * MIB,
                main_private_bytes=100 * MIB,
                worker_private_bytes=self.worker_bytes if workers else None,
            ),
        )

    def room(self) -> Room:
        return {"memory": (self.memory_bytes, 2 * self.memory_bytes), "/dev/shm": (self.shm_bytes, self.shm_bytes)}

    def sweep(self, step_s: float | None, **changes: Any) -> TuneResult:
        return self.sweeping(step_s, clock=lambda: self.now_s, **changes).run()

    def sweeping(self, step_s: float | None, **changes: Any) -> Sweep:
        """Return a sweep of this machine; keyword arguments change it."""
        given = {"measure": self.measure, "room": self.room, "progress": lambda _: None, "cores": self.cores}
        return Sweep(**{**given, "step_s": step_s, **changes})

    def workers_tried(self) -> list[int]:
        return [setting.num_workers for setting in self.tried]
