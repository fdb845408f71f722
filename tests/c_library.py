"""Small libraries in C that tests load into real programs, compiled by the system's C compiler (`cc`, or `$CC`)."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def built(source: Path, name: str) -> Path:
    """Return the shared library of that name (its soname), compiled at the first use of this source by this user."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gpuwatch-{source.stem}-{os.getuid()}" / digest / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            new = Path(scratch) / name
            compiler = os.environ.get("CC", "cc")
            flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
            subprocess.run([compiler, *flags, f"-Wl,-soname,{name}", "-o", new, source, "-lpthread"], check=True)
            new.replace(library)  # two test runs may build it at once
    return library
