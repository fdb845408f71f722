"""What `python -m benchmarks.agent --only ingest` measures, with fewer messages: all of them are taken in."""

from __future__ import annotations

from pathlib import Path

from benchmarks.agent.ingest import stages


def test_messages_of_many_ranks_are_within_the_quota(tmp_path: Path) -> None:
    """More at once than a process may send."""
    assert all(spent_s > 0 for spent_s in stages(64, 2_500, tmp_path / "history"))
