"""A training in JAX: `python jax_program.py plain|watched`. Prints what came out of it as JSON.

Its parameters are donated; each loss is dropped while it is being computed; every fifth step deletes its own array.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import gpuwatch

STEPS = 40


def step(params: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any, Any]:
    def once(_: int, w: Any) -> Any:
        return jnp.tanh(w @ params["mix"] + batch)

    w = jax.lax.fori_loop(0, 40, once, params["w"])
    return {"w": w, "mix": params["mix"] * 0.999}, jnp.mean(w), w * 2


def batches() -> Iterator[Any]:
    for number in range(STEPS):
        time.sleep(0.02)
        yield jnp.float32(number % 7) / 100


def main(watched: bool) -> None:
    key = jax.random.PRNGKey(0)
    params = {"w": jax.random.normal(key, (160, 160)), "mix": jax.random.normal(key, (160, 160)) / 13}
    jitted = jax.jit(step, donate_argnums=0)
    dropped: list[weakref.ref[Any]] = []
    survivors = 0
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(gpuwatch.Watch(quiet=True)) if watched else None
        for number, batch in enumerate(watch.steps(batches()) if watch is not None else batches()):
            params, loss, extra = jitted(params, batch)
            dropped += [weakref.ref(loss), weakref.ref(extra)]
            if number % 5 == 0:
                extra.delete()
            if number < STEPS - 1:
                del loss, extra
            del batch
            survivors += sum(ref() is not None for ref in dropped)
        report = None if watch is None else watch.report()
    live = len(jax.live_arrays())
    before = loss
    del loss, extra
    gc.collect()
    print(
        json.dumps(
            {
                "loss": float(before).hex(),
                "sum": float(params["w"].sum()).hex(),
                "survivors": survivors,
                "live": live,
                "device": None if report is None else report.device,
                "verdict": None if report is None else report.verdict.sentence,
                "failures": 0 if watch is None else watch._publisher.accounts.failures,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1] == "watched")
