"""A process that makes no progress says where it is: from its background thread, without a word while it trains."""

from __future__ import annotations

import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from gpuwatch import wire
from gpuwatch.hook.torch.communication import last_collectives
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, connect, reported, turn


def entry(group: tuple[str, str], number: int, **changes: Any) -> dict[str, Any]:
    found = {
        "process_group": list(group),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
    }
    return {**found, "state": "scheduled", "retired": True, **changes}


def recorders(monkeypatch: pytest.MonkeyPatch, **dumps: Any) -> None:
    bindings = types.SimpleNamespace(**{f"_dump_{name}_trace_json": dump for name, dump in dumps.items()})
    torch = types.SimpleNamespace(_C=types.SimpleNamespace(_distributed_c10d=bindings))
    monkeypatch.setitem(sys.modules, "torch", torch)


def dump(*entries: dict[str, Any]) -> Any:
    return lambda collectives, active: json.dumps({"entries": entries})


def test_the_last_collective_of_each_group_is_read_from_every_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    world, pair = ("0", "default_pg"), ("3", "")
    gloo = dump(entry(world, 1), entry(pair, 4, retired=False), entry(world, 2), entry(world, 9, is_p2p=True))
    nccl = dump(entry(("7", "tp"), 5, profiling_name="nccl:_broadcast_oop", state="completed", retired=False))
    recorders(monkeypatch, fr=gloo, nccl=nccl)
    assert last_collectives() == (
        wire.Collective("3", 4, "all_reduce", pending=True),
        wire.Collective("default_pg 0", 2, "all_reduce", pending=False, of_all_ranks=True),
        wire.Collective("tp 7", 5, "_broadcast_oop", pending=False),
    )


def test_of_many_groups_those_are_kept_that_are_waited_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry((str(number), "d" * 300), 1, retired=number != 40) for number in range(50)]
    recorders(monkeypatch, fr=dump(*entries))
    found = last_collectives()
    assert len(found) == wire.MAX_GROUPS and found[0].pending and len(found[0].group) == 64


def test_without_torch_or_a_recorder_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders(monkeypatch)
    assert last_collectives() == ()
    monkeypatch.delitem(sys.modules, "torch")
    assert last_collectives() == ()


def test_a_process_that_stands_still_says_where_and_forgets_it_with_the_next_step(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, accounts = connect(watch), watch._publisher.accounts
    calls: list[int] = []
    monkeypatch.setattr(
        "gpuwatch.hook.torch.communication.last_collectives",
        lambda: calls.append(clock()) or (wire.Collective("a", 3, "b", True),),
    )

    def train() -> None:
        with watch.step():
            clock.sleep_ms(10)
        turn(watch)
        accounts.note_standstill(clock())

    def noted() -> wire.Standstill | None:
        thread = threading.Thread(target=accounts.note_standstill, args=(clock(),))
        thread.start()
        thread.join()
        turn(watch)
        last = reported(agent)[-1]
        assert isinstance(last, wire.Steps)
        return last.standstill

    assert noted() is None, "no step was made yet: it starts"
    train()
    clock.sleep_ms(9_000)
    assert noted() is None
    with watch.phase("eval"):  # also where it is not known how long it may take
        clock.sleep_ms(11_000)
        found = noted()
        assert found is not None and found.collectives == (wire.Collective("a", 3, "b", True),)
        assert found.place.startswith(("noted", "Thread.")) is False and f"({Path(__file__).name}:" in found.place
        clock.sleep_ms(5_000)
        assert noted() == found and len(calls) == 1, "it is looked at every ten seconds"
        clock.sleep_ms(6_000)
        assert noted() is not None and len(calls) == 2
    train()
    assert noted() is None


def test_a_recorder_that_cannot_be_read_leaves_the_place(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = watch._publisher.accounts

    def broken(collectives: bool, active: bool) -> str:
        raise RuntimeError("no recorder")

    recorders(monkeypatch, fr=broken)
    with watch.step():
        clock.sleep_ms(10)
    turn(watch)
    clock.sleep_ms(11_000)
    with pytest.raises(RuntimeError):  # the background thread counts it as a failure, and says it once
        accounts.note_standstill(clock())
    assert accounts.standstill == wire.Standstill(accounts.standstill.place)
    accounts.note_standstill(clock())
