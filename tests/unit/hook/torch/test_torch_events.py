"""Which device's events are used, and when: on a torch that is a few names. Nothing may set a device up."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gpuwatch.hook.torch import device_events
from gpuwatch.hook.torch.device_events import CudaEvents, TorchEvents, device_in_use, torch_events


class Event:
    """An event of a device that is far ahead: reached at once."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        Event.made.append(options)
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at += 1.5
        self.stream = stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Torch:
    """A torch with one kind of accelerator."""

    def __init__(self, kind: str | None, initialized: bool = True, contexts: tuple[int, ...] = (0,)) -> None:
        self.device, self.stream, self.capturing = 0, 7, False
        self.cuda = SimpleNamespace(
            is_initialized=lambda: kind == "cuda" and initialized,
            is_available=lambda: kind == "cuda",
            is_current_stream_capturing=lambda: self.capturing,
            current_device=lambda: self.device,
            current_stream=lambda _: SimpleNamespace(stream_id=self.stream),
            Event=Event,
        )
        self.accelerator = SimpleNamespace(
            current_accelerator=lambda: None if kind is None else SimpleNamespace(type=kind),
            current_device_index=lambda: self.device,
            current_stream=lambda _: SimpleNamespace(stream_id=self.stream),
        )
        if kind not in (None, "cuda", "mps"):
            setattr(self, kind, SimpleNamespace(is_initialized=lambda: initialized))
        if kind == "mps":
            self.mps = SimpleNamespace()
        self._C = SimpleNamespace(
            _cuda_hasPrimaryContext=lambda index: index in contexts,
            _cuda_getCurrentRawStream=lambda _: self.stream,
        )
        self.Event = Event


@pytest.fixture(autouse=True)
def none_made() -> None:
    Event.made = []
    device_events._unused.clear()


@pytest.mark.parametrize(
    ("torch", "kind"),
    [
        (Torch(None), None),
        (Torch("cuda"), "cuda"),
        (Torch("cuda", initialized=False), None),
        (Torch("xpu"), "xpu"),
        (Torch("xpu", initialized=False), None),
        (Torch("mps"), None),  # it cannot tell whether it was set up
        (SimpleNamespace(), None),  # a torch that is still being imported
    ],
    ids=["none", "cuda", "cuda, not set up", "xpu", "xpu, not set up", "mps", "half a torch"],
)
def test_a_device_is_in_use_once_the_user_has_set_it_up(torch: Any, kind: str | None) -> None:
    assert device_in_use(torch) == kind
    assert (torch_events(torch) is not None) == (kind is not None)


def test_cuda_has_events_of_its_own_and_other_accelerators_torch_s() -> None:
    assert type(torch_events(Torch("cuda"))) is CudaEvents
    events = torch_events(Torch("xpu"))
    assert type(events) is TorchEvents and Event.made == [{"device": "xpu", "enable_timing": True}]
    first = events.record(None)
    second = events.record(None)
    second.record()
    assert events.elapsed_ns(first, second) == 1_500_000
    events.release(first)
    assert events.record(None) is first


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_events_outlive_their_timeline_and_serve_the_next_one_of_that_device(kind: str) -> None:
    """An event that the garbage collector destroyed in a forked loader worker would abort it."""
    torch = Torch(kind)
    events = torch_events(torch)
    assert events is not None
    held = [weakref.ref(events.record(None)) for _ in range(3)]
    events.release(held[0]())
    del events
    gc.collect()
    assert None not in [each() for each in held]
    torch.device = 1
    torch._C._cuda_hasPrimaryContext = lambda index: True
    other = torch_events(torch)
    assert other is not None and other.record(None) not in [each() for each in held]
    torch.device = 0
    next_one = torch_events(torch)
    assert next_one is not None
    assert {id(next_one.record(None)) for _ in range(3)} == {id(each()) for each in held}


def test_cuda_s_events_are_recorded_on_the_one_stream_by_the_functions_below_torch_s_own() -> None:
    torch = Torch("cuda")

    class Wrapped(Event):
        def record(self, stream: Any = None) -> None:
            raise AssertionError("looks up the current stream again")

        query = elapsed_time = record  # type: ignore[assignment]

    torch.cuda.Event = Wrapped
    torch._C._CudaEventBase = Event
    torch._C._cuda_getDevice = lambda: torch.device
    events = torch_events(torch)
    assert events is not None
    first, second = events.record(None), events.record(None)
    events.record(second)
    assert first.stream is second.stream and first.stream.stream_id == 7
    assert events.ready(second) and events.elapsed_ns(first, second) == 1_500_000


def test_an_event_never_makes_a_context_on_a_gpu_that_the_user_has_none_on() -> None:
    """`torch.zeros(1, device="cuda:1")` without `set_device`: the current device is 0, and it was not set up."""
    assert torch_events(Torch("cuda", contexts=(1,))) is None
    assert Event.made == []


def test_a_device_without_timing_events_is_left_to_the_host_s_clock() -> None:
    torch = Torch("xpu")

    def refuse(**_: Any) -> Any:
        raise NotImplementedError("no timing on this device")

    torch.Event = refuse  # type: ignore[assignment]
    assert torch_events(torch) is None


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_another_stream_or_device_is_foreign(kind: str) -> None:
    torch = Torch(kind)
    events = torch_events(torch)
    assert events is not None and events.usable() and events.foreign == 0
    torch.stream = 8
    assert not events.usable() and events.foreign == 1
    torch.stream, torch.device = 7, 1
    assert not events.usable() and events.foreign == 2
    torch.device = 0
    assert events.usable() and events.foreign == 2


@pytest.mark.parametrize("home", [0, 7], ids=["of the default stream", "of another one"])
def test_a_graph_capture_is_not_usable_and_not_foreign(home: int) -> None:
    """Capturing happens on a stream of its own: it is no prefetcher."""
    torch = Torch("cuda")
    torch.stream = home
    events = torch_events(torch)
    torch.capturing, torch.stream = True, 8
    assert events is not None and not events.usable() and events.foreign == 0


def test_a_tensor_on_another_device_of_the_kind_is_foreign() -> None:
    events = torch_events(Torch("cuda"))
    assert events is not None
    for device, foreign in (("cuda", 0), ("cpu", None), ("cuda", None), ("cuda", 1)):
        events.saw(SimpleNamespace(type=device, index=foreign))
    assert events.foreign == 1
