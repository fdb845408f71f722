"""Without being declared, what the training thread saves is `checkpoint`, and what it loads `checkpoint_load`."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch import wire
from gpuwatch.hook.account import Accounts
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, states_ms, turn

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.rendezvous import register_rendezvous_handler  # noqa: E402

BATCH = torch.zeros(2)
BEFORE = torch.save, torch.load, torch.serialization.save, dcp.save, dcp.load, dcp.async_save


class State:
    """Takes 5 ms to pickle, and 7 ms to read."""

    clock: Clock

    def __reduce__(self) -> tuple[Any, ...]:
        State.clock.sleep_ms(5)
        return read, ()


def read() -> State:
    State.clock.sleep_ms(7)
    return State()


def save_and_load(clock: Clock) -> None:
    State.clock = clock
    file = io.BytesIO()
    torch.save({"model": State()}, file)
    file.seek(0)
    torch.load(file, weights_only=False)


def test_saves_and_loads_in_a_step_and_between_passes_are_checkpoints(watch: Watch, clock: Clock) -> None:
    for _ in range(2):
        for _ in watch.steps([BATCH] * 2):
            clock.sleep_ms(10)
            save_and_load(clock)
        save_and_load(clock)
    assert states_ms(watch) == {"compute": 40, "checkpoint": 6 * 5, "other": 6 * 7}
    assert watch.report().steps == 4
    counts = watch.session.publisher.accounts.timeline.counts
    # That after the first pass and that in the step after it have no step between them: files of one checkpoint.
    assert (counts.saves, counts.declared_ns) == (5, {"checkpoint_load": 6 * 7_000_000})


def test_a_load_before_the_first_step_is_seen_and_a_save_inside_a_save_is_one(watch: Watch, clock: Clock) -> None:
    clock.sleep_ms(3)
    save_and_load(clock)
    for _ in watch.steps([BATCH] * 2):
        clock.sleep_ms(10)
        with watch.phase("checkpoint"), watch.phase("checkpoint"):
            save_and_load(clock)
    assert states_ms(watch) == {"startup": 3, "checkpoint": 5 + 2 * 12, "other": 7, "compute": 20}
    assert watch.session.publisher.accounts.timeline.counts.saves == 2


def test_safetensors_and_accelerate_s_state_are_checkpoints(
    watch: Watch, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate.utils.other has a name of its own for save_file, and Accelerate's load_state ends in load_file."""
    safetensors = pytest.importorskip("safetensors.torch")
    accelerate = pytest.importorskip("accelerate")

    def slow(ms: int, function: Any) -> Any:
        return lambda *args, **kwargs: (clock.sleep_ms(ms), function(*args, **kwargs))[1]

    for name, ms in (("serialize_file", 5), ("safe_open", 7)):
        monkeypatch.setattr(safetensors, name, slow(ms, getattr(safetensors, name)))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    before = safetensors.save_file, safetensors.load_file, accelerate.utils.other.safe_save_file
    for _ in watch.steps([BATCH]):
        clock.sleep_ms(10)
        safetensors.save_file({"w": torch.zeros(2)}, tmp_path / "own.safetensors")
        safetensors.load_file(tmp_path / "own.safetensors")
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.load_state(str(tmp_path / "state"))
    assert states_ms(watch) == {"compute": 10, "checkpoint": 2 * 5, "other": 2 * 7}
    watch.close()
    assert (safetensors.save_file, safetensors.load_file, accelerate.utils.other.safe_save_file) == before


def test_the_wait_for_other_ranks_at_the_start_is_seen(watch: Watch, clock: Clock) -> None:
    def meet(*_: Any, **__: Any) -> Iterator[Any]:
        clock.sleep_ms(9)
        yield torch.distributed.HashStore(), 0, 1

    register_rendezvous_handler("slow", meet)
    torch.distributed.init_process_group("gloo", init_method="slow://", world_size=1, rank=0)
    try:
        for _ in watch.steps([BATCH]):
            clock.sleep_ms(10)
        assert states_ms(watch) == {"other": 9, "compute": 10}
        assert watch.session.publisher.accounts.timeline.counts.declared_ns == {"rendezvous": 9_000_000}
    finally:
        torch.distributed.destroy_process_group()


def test_steps_without_a_loader_too_and_a_failing_save_raises_as_before(watch: Watch, clock: Clock) -> None:
    for _ in range(3):
        with watch.step():
            clock.sleep_ms(10)
            save_and_load(clock)
            with pytest.raises(AttributeError):
                torch.save({}, None)
    assert states_ms(watch) == {"compute": 30, "checkpoint": 15, "other": 21}


def test_a_sample_that_is_loaded_in_a_fetch_is_input_and_a_declared_phase_stays(watch: Watch, clock: Clock) -> None:
    def batches() -> Iterator[Any]:
        for _ in range(2):
            save_and_load(clock)
            yield BATCH

    for _ in watch.steps(batches()):
        clock.sleep_ms(10)
        with watch.phase("export"):
            save_and_load(clock)
    with watch.data():
        save_and_load(clock)
    assert states_ms(watch) == {"compute": 20, "input_wait": 36, "other": 24}


def test_another_threads_save_changes_nothing(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps([BATCH]):
        thread = threading.Thread(target=save_and_load, args=(clock,))
        thread.start()
        thread.join()
    assert states_ms(watch) == {"compute": 12}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_counts_once(
    watch: Watch, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, enter = [], Recorder.enter

    def count(recorder: Recorder, name: str | None, at_ns: int) -> int:
        entered.append(name)
        return enter(recorder, name, at_ns)

    monkeypatch.setattr(Recorder, "enter", count)
    for _ in watch.steps([BATCH]):
        state = {"weight": torch.zeros(3)}
        dcp.save(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
        dcp.load(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    watch.report()
    assert entered == ["checkpoint", "checkpoint_load"]


def test_torchs_own_functions_are_back_at_the_end_and_pickle_by_name_meanwhile(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps([BATCH]):
        assert torch.save is not BEFORE[0]
        assert pickle.loads(pickle.dumps(torch.save)) is torch.save
        assert pickle.loads(pickle.dumps(dcp.save)) is dcp.save
    watch.close()
    assert (torch.save, torch.load, torch.serialization.save, dcp.save, dcp.load, dcp.async_save) == BEFORE


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_torchs_own_functions_are_back_whichever_of_several_watches_ends_first(
    order: tuple[int, ...], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = [fake_watch(clock, monkeypatch) for _ in order]
    for watch in watches:
        for _ in watch.steps([BATCH]):
            pass
    for index in order:
        assert torch.save is not BEFORE[0]
        watches[index].close()
    assert (torch.save, torch.load, torch.serialization.save, dcp.save, dcp.load, dcp.async_save) == BEFORE


def test_torchs_own_functions_are_back_at_the_end_of_a_run_whose_hook_broke(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends it may have the number of the thread that failed, as the system gives them again."""

    def fail(*_: Any) -> None:
        raise OSError("broken")

    for _ in watch.steps([BATCH]):
        pass
    with monkeypatch.context() as broken:
        broken.setattr(Accounts, "apply", fail)
        watch._publisher._run()
    watch.close()
    assert (torch.save, torch.load, torch.serialization.save, dcp.save, dcp.load, dcp.async_save) == BEFORE


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, True), (SystemExit, False), (None, False)])
def test_the_agent_learns_that_an_exception_ended_the_training(
    watch: Watch, error: type[BaseException] | None, raised: bool
) -> None:
    with contextlib.suppress(RuntimeError, SystemExit), watch:
        if error is not None:
            raise error
    assert watch.session.publisher.raised is raised


@pytest.mark.parametrize(
    "step", [40, torch.tensor(40), torch.tensor([40])[0].numpy()[()]], ids=["int", "torch", "numpy"]
)
def test_the_global_step_is_known_as_a_checkpoint_has_it(watch: Watch, clock: Clock, step: Any) -> None:
    for _ in watch.steps([BATCH] * 2, start=step):
        clock.sleep_ms(10)
    for _ in watch.steps([BATCH], start=999):  # the first call counts
        clock.sleep_ms(10)
    assert watch.session.publisher.accounts.first_step == 40


@pytest.mark.parametrize("load", ["a phase", "torch.load"])
def test_a_step_that_is_given_after_a_load_says_where_the_training_goes_on(
    watch: Watch, clock: Clock, load: str
) -> None:

    def run(batches: int, start: int, taken: int | None = None, loads: bool = False) -> None:
        if loads and load == "a phase":
            with watch.phase("checkpoint_load"):
                clock.sleep_ms(5)
        elif loads:
            save_and_load(clock)
        for number, _ in enumerate(watch.steps([BATCH] * batches, start=start), 1):
            clock.sleep_ms(10)
            if number == taken:
                break

    run(20, start=10)  # 10 … 29
    run(8, start=10)  # a loop gives each pass the same number: 30 … 37
    run(2, start=20)  # or one of other units, and loads nothing
    run(10, start=10, loads=True)  # whose data are loaded by torch.load: 40 … 49
    run(20, start=40, taken=5, loads=True)  # 40 … 44
    run(3, start=45, loads=True)  # of another model: it goes on at 45
    run(3, start=0, loads=True)  # another training, such as the next fold: 48 … 50
    run(2, start=20, loads=True)
    accounts = watch.session.publisher.accounts
    assert (accounts.first_step, accounts.rewinds) == (10, ((40, 40), (51, 20)))
    for _ in range(100):
        run(1, start=20, loads=True)
    assert len(accounts.rewinds) == wire.MAX_REWINDS


def test_the_global_step_is_given_to_the_one_line_too(watch: Watch) -> None:
    with watch:
        assert len(list(gpuwatch.watch([BATCH] * 2, start=40))) == 2
    assert watch.session.publisher.accounts.first_step == 40


def test_the_global_step_is_sent_before_the_first_of_its_steps(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    turn(watch, hello=True)
    steps = iter(watch.steps([BATCH] * 2, start=40))
    next(steps)
    clock.sleep_ms(10)
    next(steps)
    turn(watch)
    turn(watch)
    kinds = [type(each).__name__ for each in reported(sender)]
    assert kinds == ["Hello", "Steps", "Hello", "Steps", "Steps"]
    assert [each.first_step for each in reported(sender) if isinstance(each, wire.Hello)] == [None, 40]
