"""What gpuwatch adds to a training step, and what others add, in one run. `--write` writes docs/evidence/overhead.md.

    python -m benchmarks.overhead [--only KEY] [--million] [--write]

Each variant has a process of its own, in which blocks of bare and of measured steps take turns: added µs are the
median, over blocks, of the block's median step less that of the bare blocks before and after it. Peers that are not
installed are left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.overhead.extras import EXTRAS, agent
from benchmarks.prose import wrapped

PAGE = ROOT / "docs" / "evidence" / "overhead.md"


def child(*options: str, launcher: tuple[str, ...] = (), **environment: str) -> tuple[Any, str]:
    """Run this program with options in a process of its own; return its JSON, None if it failed, and what it printed.

    A launcher takes a script, not a module, and the options that it hands on after `--args`.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        program = (*launcher, __file__, "--args") if launcher else (sys.executable, "-m", "benchmarks.overhead")
        done = subprocess.run(
            [*program, *options, "--out", str(out)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **environment},
            cwd=ROOT,
            check=False,
        )
        printed_text = done.stdout + done.stderr
        return (json.loads(out.read_text()) if out.exists() else None), printed_text


def cost(key: str) -> dict[str, Any] | str:
    """Return what a variant costs, or why it was not measured."""
    from benchmarks.overhead.variants import VARIANTS

    variant = next(variant for variant in VARIANTS if variant.key == key)
    if variant.needs and importlib.util.find_spec(variant.needs) is None:
        return f"not installed: {variant.needs}"
    if key == "cuda_events":
        import torch

        if not torch.cuda.is_available():
            return "not run here: no GPU"
    if key == "traceml":
        return _traceml()
    with agent() if key == "with_an_agent" else contextlib.nullcontext(("", "")) as (endpoint, _):
        measured, printed_text = child("--child", key, BENCHMARK_ENDPOINT=endpoint)
    return measured if measured is not None else f"failed: {printed_text.strip().splitlines()[-1:]}"


def _traceml() -> dict[str, Any] | str:
    program = shutil.which("traceml") or str(Path(sys.executable).parent / "traceml")
    with tempfile.TemporaryDirectory() as logs:
        launcher = (program, "run", "--logs-dir", logs, "--no-save-training-output")
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"PATH": path, "PYTHONPATH": places}
        measured, printed_text = child("--child", "traceml", launcher=launcher, **environment)
    if measured is None:
        return f"failed: {printed_text.strip().splitlines()[-3:]}"
    return {**measured, "lost": printed_text.count("Step queue full, dropping")}


def section(title: str) -> str:
    """Return a section of the page that is written by hand."""
    text = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return f"## {title}\n\n{text.strip()}\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--only", metavar="KEY", help="one variant, or one of: " + ", ".join(EXTRAS))
    parser.add_argument("--million", action="store_true", help="train 1,000,000 steps and measure the memory")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/overhead.md; with the million steps")
    parser.add_argument("--json", metavar="FILE", help="keep what was measured there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child in EXTRAS:
        options.out.write_text(json.dumps(EXTRAS[options.child]()))
        return
    if options.child:
        from benchmarks.overhead.measure import measure
        from benchmarks.overhead.variants import VARIANTS

        variant = next(variant for variant in VARIANTS if variant.key == options.child)
        options.out.write_text(json.dumps(asdict(measure(variant))))
        return
    from benchmarks.overhead.page import page, row
    from benchmarks.overhead.variants import VARIANTS

    costs: dict[str, dict[str, Any] | str] = {}
    for variant in VARIANTS:
        if options.only in (None, variant.key):
            costs[variant.key] = cost(variant.key)
            print(row(variant, costs[variant.key], None), flush=True)
    extras: dict[str, Any] = {}
    for name in EXTRAS:
        if options.only == name or (options.only is None and (name != "million" or options.million or options.write)):
            own = {"PYTHONMALLOC": "malloc"} if name == "million" else {}
            extras[name], printed_text = child("--child", name, **own)
            print(name, extras[name] or printed_text[-2000:], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"costs": costs, "extras": extras}))
    if options.only is None:
        text = page(costs, extras, section("On a GPU"), section("What the table does not tell"))
        if options.write:
            PAGE.write_text(wrapped(text))
        print(text)


if __name__ == "__main__":
    main()
