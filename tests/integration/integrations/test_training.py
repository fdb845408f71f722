"""What every integration is built on: a framework's loop, reported to a Watch."""

from __future__ import annotations

import contextlib
import os
import weakref

import pytest
import torch

import gpuwatch
from gpuwatch.integrations.training import Training


def test_an_iterator_that_was_asked_is_the_frameworks_to_release() -> None:
    class Batches:
        left = 3

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    with gpuwatch.Watch(quiet=True) as watch, contextlib.closing(Training(watch)) as training:
        for end in (3, 2):  # to its end; broken off
            batches = Batches()
            gone = weakref.ref(batches)
            with contextlib.suppress(StopIteration):
                for _ in range(end + (end == 3)):
                    training.fetched([training.fetch(batches.__next__)])
            training.end_step()
            del batches
            assert gone() is None
        assert watch.report().steps == 5


def test_with_a_closed_watch_it_trains_as_without() -> None:
    """`fit` once more after the `with Watch()` block left torch's methods replaced."""
    with gpuwatch.Watch(quiet=True) as watch:
        pass
    methods = (torch.nn.Module, "eval"), (torch.no_grad, "__enter__"), (torch.utils.data.DataLoader, "__iter__")
    before = [vars(owner)[name] for owner, name in methods]
    with contextlib.closing(Training(watch)) as training:
        assert training.fetch(lambda: 5) == 5
        training.fetched([5])
        training.end_step()
        assert [vars(owner)[name] for owner, name in methods] == before
    assert [vars(owner)[name] for owner, name in methods] == before
    assert watch.report().steps == 0


def test_a_forked_process_measures_itself_where_its_parents_watch_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """`with Watch() as w: Trainer(strategy="ddp_notebook", callbacks=[GpuWatchCallback(w)])`: no rank was measured."""
    monkeypatch.setenv("GPUWATCH_QUIET", "1")
    with gpuwatch.Watch() as watch:
        pid = os.fork()
        if not pid:
            code = 100
            try:
                training = Training(watch)
                for number in range(3):
                    training.fetched([training.fetch(lambda number=number: number)])
                training.end_step()
                code = training.watch.report().steps
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert watch.report().steps == 0
