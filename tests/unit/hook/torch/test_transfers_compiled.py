"""What torch compiles in a watched loop is what it compiles in a bare one: graphs, how often, and results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gpuwatch.hook.torch.compile import CompileWatch
from gpuwatch.hook.torch.tensor_patch import COMPILED_AROUND
from gpuwatch.hook.watch import Watch, open_watches
from tests.unit.hook.fakes import MS, Clock, fake_watch, in_autograds_thread, in_thread_of_c, turn
from tests.unit.hook.torch.test_transfers import counted_changes

torch = pytest.importorskip("torch")
dynamo = pytest.importorskip("torch._dynamo")
testing = pytest.importorskip("torch._dynamo.testing")


class Recording(torch.Tensor):
    """A subclass that records what is called."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "to a type": lambda x: x.to(torch.float64) * 2,
    "to a device": lambda x: x.to("cpu") * 2,
    "to as asked of the class": lambda x: torch.Tensor.to(x, torch.float64) * 2,
    "cpu": lambda x: x.cpu() * 2,
    "float": lambda x: float(x.sum()) * 2,
    "if": lambda x: x * 2 if x.sum() > 0 else x,
    "tolist": lambda x: x.tolist(),
}
CONTEXTS: dict[str, Callable[[], Any]] = {
    "no mode": contextlib.nullcontext,
    "a mode": Mode,
    "a default device": lambda: torch.device("cpu"),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    learned = dynamo.trace_rules.get_tensor_method
    learned.cache_clear(), learned()  # another test may have had a `to` of its own when it was learned
    with dynamo.config.patch(capture_scalar_outputs=True):
        yield
    dynamo.reset()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = fake_watch(Clock(), monkeypatch)
    yield watch
    watch.close()


def reported(loop: Callable[[list[Any]], Iterable[Any]], call: Any, kind: Any, context: Any, whole: bool) -> Any:
    """Return what three passes over a compiled function give: results, graphs, and dynamo's own counts."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    backend = testing.EagerAndRecordGraphs()
    compiled = torch.compile(call, backend=backend, fullgraph=whole)
    results = []
    try:
        for _ in range(3):
            for batch in loop([torch.ones(3).as_subclass(kind)] * 2):
                with context():
                    result = compiled(batch)
                tensor = isinstance(result, torch.Tensor)
                results.append((type(result), result.tolist() if tensor else result))
    except Exception as error:
        return type(error), str(error).split("\n", 1)[0]
    counters = dynamo.utils.counters
    graphs = [[str(node.target) for node in graph.graph.nodes] for graph in backend.graphs]
    return results, graphs, *(dict(counters[name]) for name in ("stats", "graph_break"))


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("kind", [torch.Tensor, Recording])
@pytest.mark.parametrize("whole", [True, False], ids=["fullgraph", "graph breaks"])
def test_graphs_are_those_of_a_bare_loop(kind: Any, context: Any, whole: bool, watch: Watch) -> None:
    for name, call in FUNCTIONS.items():
        assert reported(watch.steps, call, kind, context, whole) == reported(iter, call, kind, context, whole), name


@pytest.mark.parametrize("kind", [torch.Tensor, Recording])
def test_what_was_compiled_before_is_not_compiled_again(kind: Any, watch: Watch) -> None:
    dynamo.reset()
    count = testing.CompileCounter()
    compiled = torch.compile(FUNCTIONS["to a type"], backend=count, fullgraph=True)
    compiled(torch.ones(3).as_subclass(kind))
    for _ in range(2):
        for batch in watch.steps([torch.ones(3).as_subclass(kind)] * 2):
            compiled(batch)
    compiled(torch.ones(3).as_subclass(kind))
    assert count.frame_count == 1


def test_a_copy_is_timed_after_torch_has_compiled_as_before(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = watch._recorder.clock
    original = torch._C.TensorBase.to

    def slow(tensor: Any, *args: Any) -> Any:
        clock.sleep_ms(3)
        return original(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "to", slow)
    compiled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    for index, batch in enumerate(watch.steps([torch.ones(3)] * 4)):
        if index == 1:
            compiled(batch)
        batch.to("meta")
    turn(watch)
    assert watch._publisher.accounts.timeline.counts.phases_ns["transfer"] == 12 * MS


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_nothing_of_two_watches_is_there_while_torch_compiles(
    first_ends_first: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fake_watch(Clock(), monkeypatch)
    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append("to" in torch.Tensor.__dict__)
        return graph.forward

    loops = [iter(watch.steps([torch.ones(3)] * 2)), iter(other.steps([torch.ones(3)] * 2))]
    next(loops[0]), next(loops[1])
    for size in range(2, 4):
        dynamo.reset()
        watch.session.torch_hooks._compiling.install(), other.session.torch_hooks._compiling.install()
        torch.compile(FUNCTIONS["to a type"], backend=backend, fullgraph=True)(torch.ones(size).as_subclass(Recording))
        assert "to" in torch.Tensor.__dict__
    assert seen == [False, False]
    loops.pop(0 if first_ends_first else 1)
    assert "to" in torch.Tensor.__dict__
    loops.clear()
    assert "to" not in torch.Tensor.__dict__
    other.close()


def test_a_loop_that_ends_or_begins_while_torch_compiles_leaves_torch_as_it_was(watch: Watch) -> None:
    loops = [iter(watch.steps([torch.ones(3)] * 2))]
    next(loops[0])

    def ends(graph: Any, inputs: Any) -> Any:
        loops.clear()
        return graph.forward

    def begins(graph: Any, inputs: Any) -> Any:
        loops.append(iter(watch.steps([torch.ones(3)] * 2)))
        next(loops[-1])
        assert "to" not in torch.Tensor.__dict__
        return graph.forward

    compiled = torch.compile(FUNCTIONS["to a type"], backend=ends)
    compiled(torch.ones(3))
    assert "to" not in torch.Tensor.__dict__
    torch.compile(FUNCTIONS["cpu"], backend=begins)(torch.ones(3))
    assert "to" in torch.Tensor.__dict__
    loops.clear()
    assert "to" not in torch.Tensor.__dict__


def test_a_watch_that_is_closed_leaves_nothing_with_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in list(open_watches):  # of other tests
        each.close()
    handler = dynamo.callback.callback_handler
    for begins in list(handler.start_callbacks):  # of a Watch that a test has not closed
        if isinstance(compiling := getattr(begins, "__self__", None), CompileWatch):
            compiling.remove()
    finders = list(sys.meta_path)
    callbacks = len(handler.start_callbacks), len(handler.end_callbacks)
    watch = fake_watch(Clock(), monkeypatch)
    for _ in watch.steps([1, 2]):
        assert len(handler.start_callbacks) == callbacks[0] + 1
        dynamo.reset()
        assert (len(handler.start_callbacks), len(handler.end_callbacks)) == (callbacks[0] + 1, callbacks[1] + 1), (
            "ours stay"
        )
    watch.close()
    assert "clear" not in vars(handler)
    assert not [
        each for each in handler.start_callbacks if "gpuwatch" in type(getattr(each, "__self__", None)).__module__
    ]
    assert sys.meta_path == finders


def test_without_a_compilation_nothing_changes_in_a_loop(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(3))
    for batch in watch.steps([torch.ones(3)] * 2):
        compiled(batch)
    with counted_changes(monkeypatch) as changes:
        loop = iter(watch.steps([torch.ones(3)] * 50))
        next(loop)
        begun = len(changes)
        for batch in loop:
            compiled(batch)
            assert len(changes) == begun or batch is None


def test_many_compilations_change_the_class_a_bounded_number_of_times(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_changes(monkeypatch) as changes:
        for _ in watch.steps([1]):
            for _ in range(300):
                watch.session.torch_hooks._compiling._begins(None)
                assert "to" not in torch.Tensor.__dict__
                watch.session.torch_hooks._compiling._ends(None)
            assert "to" not in torch.Tensor.__dict__
        assert len(changes) == 2 * 2 * (COMPILED_AROUND + 1)
        for _ in watch.steps([1]):
            assert "to" in torch.Tensor.__dict__, "the next pass has it again"


@pytest.mark.parametrize("declared", [False, True], ids=["a loop", "declared steps"])
def test_what_is_compiled_in_a_backward_pass_on_a_device_is_compile(
    declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    lazy = dynamo.callback.CallbackTrigger.LAZY_BACKWARD

    def compiles() -> None:
        with dynamo.callback.callback_handler.install_callbacks(lazy, "0/0"):
            clock.sleep_ms(20_000)

    def train(number: int) -> None:
        clock.sleep_ms(10)
        if number == 1:  # the training thread waits in `backward()`
            in_autograds_thread(compiles)

    if declared:
        for number in range(3):
            with watch.step():
                train(number)
    else:
        for number in watch.steps([0, 1, 2]):
            train(number)
    turn(watch)
    states = watch.report().states
    watch.close()
    assert states.get("compile") == pytest.approx(20)
    assert states["compute"] == pytest.approx(0.030)


@pytest.mark.parametrize("logs", [False, True])
def test_what_another_thread_of_c_compiles_is_no_phase_of_the_training(
    logs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of a Ray actor that serves beside the one that trains: only a backward pass is waited for."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)

    def compiles() -> None:
        with dynamo.callback.callback_handler.install_callbacks(dynamo.callback.CallbackTrigger.DYNAMO, "0/0"):
            clock.sleep_ms(20_000)

    for number in watch.steps([0, 1, 2]):
        clock.sleep_ms(10)
        if number == 1:
            in_thread_of_c(compiles, logs)
    turn(watch)
    states = watch.report().states
    watch.close()
    assert "compile" not in states and states["compute"] == pytest.approx(20.030)
