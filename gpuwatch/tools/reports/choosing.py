"""Which run is meant: by its id, by its name, or `last`."""

from __future__ import annotations

from difflib import get_close_matches

from gpuwatch.api import Run
from gpuwatch.api.client import RunSource
from gpuwatch.errors import ConfigError

LAST = "last"


def choose(source: RunSource, wanted: str) -> list[Run]:
    """Return the ranks of one run, rank 0 first. Of several runs of a name it is the one that was heard last.

    Raises: ConfigError where there is none.
    """
    runs = sorted(source.runs(kept=True), key=lambda run: -run.last_message_s)
    if not runs:
        raise ConfigError(f"{source.where} knows no run yet; start a training with gpuwatch.watch(loader)")
    chosen = next((run for run in runs if run.run == wanted), None)
    chosen = chosen or next((run for run in runs if run.name == wanted), None)
    if chosen is None and wanted == LAST:
        chosen = runs[0]
    if chosen is None:
        names = list(dict.fromkeys(name for run in runs for name in (run.name, run.run)))
        near = get_close_matches(wanted, names, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"it knows {', '.join(names[:8])}"
        raise ConfigError(f"{source.where} knows no run {wanted!r}; {hint}")
    return sorted((run for run in runs if run.run == chosen.run), key=lambda run: run.rank)
