"""Peaks of the GPU's memory, and the end of a run for lack of it.

torch.cuda is a stand-in with its names, which counts what would set a device up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.fakes import FakeDevice
from gpuwatch.hook.torch import memory
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, fake_watch

GIB = 1 << 30


class Cuda:
    """Two devices, of which the second one is used."""

    def __init__(self, allocated: int = 70 * GIB, reserved: int = 78 * GIB) -> None:
        self.initialized, self.calls = True, list[str]()
        self.OutOfMemoryError = OutOfMemoryError  # before torch 2.5 it is nowhere else
        self._peaks = [{}, {"allocated_bytes.all.peak": allocated, "reserved_bytes.all.peak": reserved}]
        self.memory = SimpleNamespace(
            _record_memory_history=lambda max_entries: self.calls.append(f"records {max_entries}"),
            _dump_snapshot=lambda file: Path(file).write_text("snapshot"),
        )

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        assert self.initialized, "it would ask the driver"
        return 2

    def memory_stats(self, device: int) -> dict[str, int]:
        assert self.initialized, "it would set the device up"
        return self._peaks[device]


class OutOfMemoryError(RuntimeError):
    pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.delenv("GPUWATCH_OOM_SNAPSHOT", raising=False)
    torch: Any = ModuleType("torch")
    torch.cuda = Cuda()
    torch.is_grad_enabled = lambda: True
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch.cuda  # type: ignore[no-any-return]


class Batch:
    shape, nbytes = (8, 3), 33 << 20


def trained(clock: Clock, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, **options: Any) -> Watch:
    watch = fake_watch(clock, monkeypatch, **options)
    monkeypatch.setattr(watch.session.torch_hooks, "find_device", lambda: None)
    try:
        with watch:
            for _ in watch.steps([Batch()] * 50):
                clock.sleep_ms(7)
            if error is not None:
                raise error
    except RuntimeError:
        pass
    return watch


def test_a_run_that_ends_for_lack_of_memory_gets_its_numbers_and_advice(
    cuda: Cuda, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = trained(clock, monkeypatch, OutOfMemoryError("CUDA out of memory"), quiet=False)
    text = capsys.readouterr().err
    assert (
        text.count("out of GPU memory: at the peak 70 GiB in tensors, 78 GiB reserved by torch; a batch takes 33 MiB")
        == 1
    )
    assert "torch.utils.checkpoint; much of the reserved" in text and "GPUWATCH_OOM_SNAPSHOT=FILE" in text
    assert "  peak  70 GiB of GPU memory in tensors, 78 GiB reserved\n" in text
    metrics = watch.report().metrics()
    assert metrics["gpuwatch/memory_allocated_peak_bytes"] == 70 * GIB
    assert metrics["gpuwatch/memory_reserved_peak_bytes"] == 78 * GIB


@pytest.mark.parametrize("error", [None, RuntimeError("another one")])
def test_any_other_end_is_not_explained(
    error: BaseException | None,
    cuda: Cuda,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(clock, monkeypatch, error, quiet=False)
    assert "out of GPU memory" not in capsys.readouterr().err


def test_nothing_is_asked_of_a_device_that_is_not_set_up(
    cuda: Cuda, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUWATCH_OOM_SNAPSHOT", str(tmp_path / "oom.pickle"))
    cuda.initialized = False
    watch = trained(clock, monkeypatch, OutOfMemoryError(), quiet=False)
    text = capsys.readouterr().err
    assert "out of GPU memory" not in text and "peak" not in text
    assert not any("memory" in name for name in watch.report().metrics())
    assert not (tmp_path / "oom.pickle").exists()


def attached(kind: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Watch:
    device = FakeDevice(clock)
    device.kind = kind  # type: ignore[attr-defined]
    watch = fake_watch(clock, monkeypatch)
    hooks = watch.session.torch_hooks
    hooks._streams.install = lambda kind: None  # type: ignore[method-assign]
    watch.session.guard(lambda: hooks.attach(device))
    return watch


def test_the_snapshot_is_opt_in_and_one_file_a_rank(
    cuda: Cuda, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(kind: str) -> list[str]:
        attached(kind, clock, monkeypatch).close()
        return cuda.calls

    assert found("cuda") == []
    monkeypatch.setenv("GPUWATCH_OOM_SNAPSHOT", str(tmp_path / "oom.pickle"))
    assert found("xpu") == [] and found("cuda") == ["records 100000"]
    for rank in (0, 2):
        assert "The live allocations are in" in memory.explain(OutOfMemoryError, None, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oom.pickle", "oom.pickle.rank2"]


def test_without_room_for_the_snapshot_the_peaks_and_the_advice_are_printed(
    cuda: Cuda, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUWATCH_OOM_SNAPSHOT", str(tmp_path / "no folder" / "oom.pickle"))
    trained(clock, monkeypatch, OutOfMemoryError(), quiet=False)
    text = capsys.readouterr().err
    assert "out of GPU memory: at the peak 70 GiB" in text and "gradient accumulation" in text
    assert "The live allocations are in" not in text and "No such file or directory" in text


def test_an_allocator_that_records_nothing_leaves_the_device_measured(
    cuda: Cuda, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, or RMM's."""

    def refuses(max_entries: int) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory.")

    cuda.memory._record_memory_history = refuses
    monkeypatch.setenv("GPUWATCH_OOM_SNAPSHOT", str(tmp_path / "oom.pickle"))
    watch = attached("cuda", clock, monkeypatch)
    assert watch._recorder.timeline is not None and watch.session.publisher.accounts.failures == 1
    watch.close()


def test_segments_that_expand_already_are_not_advised(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
        assert "expandable_segments" in memory.explain(OutOfMemoryError, None, 0)
        monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments: True")
        assert "expandable_segments" not in memory.explain(OutOfMemoryError, None, 0)
        monkeypatch.delenv(name)
