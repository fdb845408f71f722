"""All programs by name: each of these modules adds its own."""

from benchmarks.programs import PROGRAMS, cuda, frameworks, habits, heldout, loaders, loops, rl, tutorials, unseen  # noqa: F401

__all__ = ["PROGRAMS"]
