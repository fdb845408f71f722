"""The user's own function that a thread is in."""

from __future__ import annotations

import threading
import time

from gpuwatch.host.frames import OWN, OwnFrames, Place, is_users, may_be_users


def slow_read(done: threading.Event) -> None:
    done.wait(10)


def other(done: threading.Event) -> None:
    slow_read(done)


def test_the_deepest_function_of_the_user_s_is_named() -> None:
    done, frames = threading.Event(), OwnFrames()
    thread = threading.Thread(target=other, args=(done,))
    thread.start()
    try:
        while not frames.most_frequent("step") and time.monotonic():
            frames.sample(thread.ident, "step")
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("step")
    assert place is not None and place.function == "slow_read" and place.file == __file__
    assert place.ratio > 0.5 and str(place) == f"slow_read (test_frames.py:{place.line})"
    assert frames.most_frequent("data_wait") is None, "not sampled"
    frames.sample(thread.ident, "data_wait")
    frames.sample(None, "data_wait")
    assert frames.most_frequent("data_wait") is None, "a thread that has ended has no frame"


def test_whose_a_file_is() -> None:
    assert is_users("/home/me/data.py")
    assert not is_users("/usr/lib/python3.11/queue.py") and not is_users("<frozen importlib._bootstrap>")
    assert not is_users("/v/lib/python3.11/site-packages/mine/data.py")
    assert may_be_users("/v/lib/python3.11/site-packages/mine/data.py")
    assert not may_be_users("/v/lib/python3.11/site-packages/torch/nn/modules/module.py")
    assert not may_be_users(f"{OWN}hook/loop.py")
    assert str(Place("a.<locals>.b", "/x/y.py", 3, 1.0)) == "a.<locals>.b (y.py:3)"
