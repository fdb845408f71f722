"""Copies in the loop's body are timed without a line of code, and nothing of torch stays changed.

The "device" here is torch's `meta`: a copy to it is a real `.to` from the CPU to something else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.fakes import FakeDevice
from gpuwatch.hook import watch as hook_watch
from gpuwatch.hook.torch.transfers import READS
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, fake_watch, turn

torch = pytest.importorskip("torch")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slow_copies(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every copy take 3 ms on the test's clock, below what gpuwatch replaces."""
    original = torch._C.TensorBase.to

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        clock.sleep_ms(3)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)


def transferred_ms(watch: Watch) -> float:
    turn(watch)
    return watch._publisher.accounts.timeline.counts.phases_ns["transfer"] / MS


def batches(count: int) -> list[Any]:
    return [torch.ones(4) for _ in range(count)]


def test_a_plain_to_in_the_body_is_transfer(clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    for batch in watch.steps(batches(4)):
        batch.to("meta")
        clock.sleep_ms(10)
    assert transferred_ms(watch) == 12
    assert watch.report().states["compute"] == pytest.approx(0.040)
    watch.close()


def test_what_is_no_copy_to_a_device_is_not_transfer(
    clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = fake_watch(clock, monkeypatch)
    for batch in watch.steps(batches(2)):
        batch.to(torch.float64)
        batch.to("cpu")
        batch.to(batch)
        batch.to(device="cpu", dtype=torch.float16)
    assert transferred_ms(watch) == 0
    watch.close()


def test_the_original_is_back_after_every_way_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "to" not in torch.Tensor.__dict__ and "cuda" not in torch.Tensor.__dict__
    watch = fake_watch(clock, monkeypatch)

    def is_original() -> bool:
        return "to" not in torch.Tensor.__dict__ and "cuda" not in torch.Tensor.__dict__

    for _ in watch.steps(batches(2)):
        assert not is_original()
    assert is_original()
    for _ in watch.steps(batches(2)):
        break
    assert is_original()
    with pytest.raises(ZeroDivisionError):
        for _ in watch.steps(batches(2)):
            _ = 1 / 0
    assert is_original()
    for _ in watch.steps(batches(2)):
        for _ in watch.steps(batches(2)):
            assert not is_original()
        assert not is_original()
    assert is_original()
    for _ in watch.steps(batches(2)):
        pass
    assert not is_original(), "a fifth pass: from now on it stays, so that the class does not change with every pass"
    kept = iter(watch.steps(batches(2)))
    next(kept)
    watch.close()
    assert is_original()


def test_what_somebody_else_put_there_is_left_as_it_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._C.TensorBase.to

    def theirs(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", theirs)
    watch = fake_watch(clock, monkeypatch)
    for _ in watch.steps(batches(1)):
        assert torch.Tensor.to is not theirs
    assert torch.Tensor.to is theirs
    watch.close()


def test_it_acts_in_the_training_thread_alone(clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    for batch in watch.steps(batches(1)):
        other = threading.Thread(target=batch.to, args=("meta",))
        other.start()
        other.join()
    assert transferred_ms(watch) == 0
    watch.close()


def test_it_is_off_with_one_argument(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch, transfers=False)
    for _ in watch.steps(batches(1)):
        assert "to" not in torch.Tensor.__dict__
    watch.close()


def test_a_batch_that_the_watch_moves_is_counted_once(
    clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = fake_watch(clock, monkeypatch)
    for batch in watch.steps(batches(3), to="meta"):
        assert batch.device.type == "meta"
    assert transferred_ms(watch) == 9
    watch.close()


def test_errors_of_a_copy_are_the_user_s(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    with pytest.raises(RuntimeError, match="nonsense"):
        for batch in watch.steps(batches(1)):
            batch.to("nonsense")
    watch.close()


def test_compiled_code_is_not_broken_into_graphs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)

    def forward(x: Any) -> Any:
        return x.to(torch.float64).to("cpu") * 2

    counted = 0
    for batch in watch.steps(batches(2)):
        torch._dynamo.reset()
        explained = torch._dynamo.explain(forward)(batch)
        counted += explained.graph_break_count
    assert counted == 0
    watch.close()


# How often the class changes ------------------------------------------------------------------------------------------
# Python >= 3.13 gives a class 1,000 versions, one for each change after a look-up, and then caches none of its
# attributes any more.


@contextmanager
def counted_changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the names of the attributes of torch.Tensor that gpuwatch sets or deletes, one row for each change."""
    changes: list[str] = []

    def setting(owner: Any, name: str, value: Any) -> None:
        changes.extend([name] * (owner is torch.Tensor))
        setattr(owner, name, value)

    def deleting(owner: Any, name: str) -> None:
        changes.extend([name] * (owner is torch.Tensor))
        delattr(owner, name)

    with monkeypatch.context() as patch:
        patch.setattr("gpuwatch.hook.torch.tensor_patch.setattr", setting, raising=False)
        patch.setattr("gpuwatch.hook.torch.tensor_patch.delattr", deleting, raising=False)
        yield changes


def test_the_class_changes_a_bounded_number_of_times_however_many_passes(
    clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = fake_watch(clock, monkeypatch)
    with counted_changes(monkeypatch) as changes:
        for _ in range(300):
            for batch in watch.steps(batches(2)):
                batch.to("meta")
        assert 2 <= len(changes) <= 32
        watch.close()
        assert len(changes) <= 34
    assert watch.report().states["transfer"] == pytest.approx(300 * 2 * 0.003), "each copy of each pass is timed"


def test_with_a_device_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    device = FakeDevice(clock)
    with counted_changes(monkeypatch) as changes:
        for _ in watch.steps(batches(2)):
            assert not set(READS) & set(vars(torch.Tensor)), "nothing reads from a device where there is none"
        watch.session.torch_hooks.attach(device)
        for _ in range(300):
            for _ in watch.steps(batches(2)):
                assert set(READS) <= set(vars(torch.Tensor))
        watch.close()
        assert len(changes) <= 80
    assert not {"to", "cuda", *READS} & set(vars(torch.Tensor))


def test_runs_one_after_another_leave_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = fake_watch(clock, monkeypatch), fake_watch(clock, monkeypatch)
    for _ in range(6):
        for _ in first.steps(batches(1)):
            for _ in second.steps(batches(1)):
                pass
    assert "to" in vars(torch.Tensor)
    first.close()
    assert "to" in vars(torch.Tensor)
    second.close()
    assert "to" not in vars(torch.Tensor) and "cuda" not in vars(torch.Tensor)


def test_between_two_passes_nothing_is_timed(clock: Clock, slow_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    for _ in range(6):
        for _ in watch.steps(batches(1)):
            pass
    with watch.step():
        assert "to" in vars(torch.Tensor) and torch.Tensor.to is not torch._C.TensorBase.to
        assert torch.ones(2).to("meta").device.type == "meta"
    assert transferred_ms(watch) == 0
    watch.close()


def test_a_forked_child_has_torch_s_own_methods(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(clock, monkeypatch)
    watch.session.torch_hooks.attach(FakeDevice(clock))
    monkeypatch.setattr(hook_watch, "open_watches", [watch])
    for _ in watch.steps(batches(1)):
        assert {"to", "cuda", *READS} <= set(vars(torch.Tensor))
        child = os.fork()
        if not child:
            os._exit(len({"to", "cuda", *READS} & set(vars(torch.Tensor))))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert {"to", "cuda", *READS} <= set(vars(torch.Tensor)), "the parent's stay"
    watch.close()
