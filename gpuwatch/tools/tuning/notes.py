"""What a reader must know to trust a table."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.formatting import size
from gpuwatch.tools.tuning.bounds import measured
from gpuwatch.tools.tuning.host import Room
from gpuwatch.tools.tuning.rows import Measured, Row


def warnings(rows: Sequence[Row], chosen: Measured, start: Room) -> list[str]:
    """Return a sentence for each way in which the figures may mislead."""
    found = []
    done = measured(rows)
    first = done[0].read_bytes_per_s
    last = chosen.read_bytes_per_s
    if first is not None and last is not None and done[0].batch_bytes:
        per_batch, later = first * done[0].batch_s, last * chosen.batch_s
        if per_batch > 0.05 * done[0].batch_bytes and later < 0.5 * per_batch:
            found.append(
                f"storage: the first trial read {size(per_batch)} a batch, the chosen one {size(later)}; "
                "the rest came from the page cache, and a cold pass is slower"
            )
    others = max(row.others_cores or 0.0 for row in done)
    if others > 0.25 * start.cores:
        found.append(
            f"the machine was shared: other processes kept up to {others:.1f} cores busy meanwhile, which slows some rows"
        )
    if any(not row.steady for row in done):
        found.append("* a pass is shorter than what workers make ahead: whole passes were timed, their start included")
    if chosen.cpu_cores is not None and chosen.setting.num_workers and chosen.cpu_cores > start.cores - 0.5:
        found.append("the loader alone takes all cores; training needs one of them too")
    return found
