"""Build a CUDA runtime that needs no GPU, for torch's own CUDA build, and stubs for the other libraries of that build.

    python tests/cuda_runtime/build.py        # where torch is a CUDA build, installed without its dependencies

What is missing, and which functions and symbol versions torch wants of each library, is read from torch's own libraries
(`nm`, `readelf`), so another release of torch with CUDA 13 needs no change here. All files go to torch's `lib` folder,
where torch looks last: where NVIDIA's own libraries are installed, nothing is built and the command fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

_SOURCE = Path(__file__).with_name("cudart.c")
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"
_FOREIGN = re.compile(r"lib(cu|nv|nccl)")
"""Libraries of NVIDIA's, by name."""
_UNVERSIONED = {
    DRIVER: r"cu(?!File)[A-Z]",
    "libcufile.so.0": "cuFile",
    "libnccl.so.2": "nccl",
    "libcusparseLt.so.0": "cusparseLt",
}
"""Libraries whose functions have no symbol version, and how the names of their functions begin."""
_C_NAME = re.compile(r"[A-Za-z]\w*$|__cuda\w+$")


def torch_libraries() -> Path:
    """Return the folder of torch's libraries. torch is not imported. Raises: SystemExit where it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed here: make test-cuda-runtime sets up an environment that has it")
    return Path(spec.origin).parent / "lib"


def build(libraries: Path) -> list[Path]:
    """Build what is missing into the folder of torch's libraries; return it. Raises: SystemExit, with the reason."""
    needed, wanted = _imports(path for path in sorted(libraries.glob("*.so*")) if not _FOREIGN.match(path.name))
    if RUNTIME not in needed:
        raise SystemExit(
            f"{libraries}: this torch does not load {RUNTIME}: it is a CPU build, or has another version of CUDA"
        )
    installed = sorted((libraries.parent.parent / "nvidia").glob("*/lib/libcudart.so*"))
    if installed:
        raise SystemExit(f"{installed[0]}: NVIDIA's own runtime is installed here, and torch would load that")
    built = []
    with tempfile.TemporaryDirectory() as directory:
        for library in sorted(needed, key=lambda name: name != RUNTIME):  # the driver is linked to the runtime
            functions = wanted.get(library, {})
            sources = [_write_stubs(Path(directory), library, functions)]
            options = []
            if library == RUNTIME:
                sources.append(_SOURCE)
            elif library == DRIVER:
                options = ["-Wl,--no-as-needed", str(libraries / RUNTIME)]
            version = next((version for version in functions.values() if version), None)
            if version is not None:
                script = Path(directory, "versions")
                script.write_text(f"{version} {{ global: *; }};\n")
                options.append(f"-Wl,--version-script={script}")
            output = libraries / library
            temporary = output.with_suffix(".building")
            compiler = os.environ.get("CC", "cc")
            flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname={library}"]
            _run(compiler, *flags, "-o", str(temporary), *map(str, sources), *options, "-lpthread", "-ldl")
            temporary.replace(output)
            built.append(output)
    return built


def _imports(paths: Iterable[Path]) -> tuple[set[str], dict[str, dict[str, str]]]:
    """Return the foreign libraries that these files need, and the functions that they import from each.

    Each function comes with its symbol version, or "" where it has none.
    """
    needed: set[str] = set()
    wanted: dict[str, dict[str, str]] = {}
    for path in paths:
        found = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "--dynamic", "--wide", str(path)))
        needed.update(name for name in found if _FOREIGN.match(name))
        versions = _version_files(path)
        for line in _run("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", str(path)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            library = versions.get(version) or next(
                (library for library, begin in _UNVERSIONED.items() if not version and re.match(begin, name)), None
            )
            if library is not None and _FOREIGN.match(library) and _C_NAME.match(name):
                wanted.setdefault(library, {})[name] = version
    return needed, wanted


def _version_files(path: Path) -> dict[str, str]:
    """Return the library behind each symbol version that a library wants.

    For example {"libcudart.so.13": "libcudart.so.13", "NVSHMEM": …}.
    """
    files, library = {}, ""
    for line in _run("readelf", "--version-info", "--wide", str(path)).splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+) .*Flags:", line)):
            files[match[1]] = library
    return files


def _write_stubs(directory: Path, library: str, functions: Iterable[str]) -> Path:
    """Write a C file with those functions that `cudart.c` does not have. Return its path.

    A function of the runtime counts the call and returns the error "not supported"; any other returns 0, success.
    """
    defined = set(re.findall(r"^\S.*?\b(\w+)\(.*\{", _SOURCE.read_text(), re.MULTILINE))
    lines = ["int sim_missing(int *id, const char *name);"] if library == RUNTIME else []
    for name in sorted(set(functions) - defined):
        body = f'static int id = -1; return sim_missing(&id, "{name}");' if library == RUNTIME else "return 0;"
        lines.append(f"int {name}(void) {{ {body} }}")
    path = directory / f"{library}.c"
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    begin = time.monotonic()
    made = build(torch_libraries())
    size = sum(path.stat().st_size for path in made)
    print(
        f"{len(made)} libraries, {size >> 10} KiB, in {time.monotonic() - begin:.1f} s: {', '.join(path.name for path in made)}"
    )
    sys.exit(0)
