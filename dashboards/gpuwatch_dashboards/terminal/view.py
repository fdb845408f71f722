"""What the reader has chosen, and what a key does to it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.terminal.facts import Facts

Page = Literal["runs", "gpus", "findings", "help"]
_PAGES: dict[str, Page] = {"g": "gpus", "f": "findings", "?": "help", "h": "help"}
_STEPS = {"up": -1, "down": 1, "page_up": -10, "page_down": 10, "home": -(1 << 30), "end": 1 << 30}


@dataclass(frozen=True)
class View:
    page: Page = "runs"
    run: str | None = None
    """The key of the chosen run; None: the newest that runs."""
    gpu: int = 0
    scroll: int = 0
    """First line in sight of a page that is read by scrolling."""
    done: bool = False

    def pressed(self, key: str, facts: Facts | None, scroll_end: int = 0) -> View:
        """Return the view after a key; `scroll_end` is how far the page now in sight can be scrolled."""
        if key == "q":
            return replace(self, done=True)
        if key in _PAGES:
            page: Page = "runs" if self.page == _PAGES[key] else _PAGES[key]
            return replace(self, page=page, scroll=0)
        if key in ("escape", "r"):
            return replace(self, page="runs", scroll=0)
        if key == "enter" and self.page == "gpus":
            return self._to_run_of_gpu(facts)
        if key in _STEPS:
            return self._moved(_STEPS[key], facts, scroll_end)
        return self

    def _moved(self, by: int, facts: Facts | None, scroll_end: int) -> View:
        if self.page in ("findings", "help"):
            return replace(self, scroll=_clamp(self.scroll + by, scroll_end))
        if facts is None:
            return self
        if self.page == "gpus":
            return replace(self, gpu=_clamp(self.gpu + by, len(facts.gpus) - 1))
        keys = [key_of(run) for run in facts.runs]
        if not keys:
            return self
        chosen = self.run if self.run in keys else facts.selected
        at = keys.index(chosen) if chosen in keys else 0
        return replace(self, run=keys[_clamp(at + by, len(keys) - 1)])

    def _to_run_of_gpu(self, facts: Facts | None) -> View:
        gpu = facts.gpus[self.gpu] if facts is not None and self.gpu < len(facts.gpus) else None
        run = next((run for run in facts.runs if gpu is not None and run.run == gpu.run), None) if facts else None
        return replace(self, page="runs", run=key_of(run)) if run is not None else self


def _clamp(value: int, most: int) -> int:
    return max(0, min(value, most))
