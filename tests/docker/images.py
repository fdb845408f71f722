"""The base images that the compose file needs: pulled, or built from Debian under the same names where no registry
can be reached. The names come from docker-compose.yml and the Dockerfile themselves, so a new pin needs no change here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.docker.engine import Engine, Unavailable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BOOKWORM = "gpuwatch-test-bookworm:latest"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
PACKAGES = ("busybox", "ca-certificates", "prometheus", "prometheus-alertmanager", "python3", "python3-venv")
"""One root for all three images. busybox is the wget of the upstream images' health checks."""


def compose_image(service: str) -> str:
    """Return the image that docker-compose.yml names for a service."""
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return str(compose["services"][service]["image"])


def python_image() -> str:
    """Return the base image of our own Dockerfile."""
    names = set(re.findall(r"^FROM (\S+)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    assert len(names) == 1, f"the Dockerfile starts from several images: {names}"
    return str(names.pop())


def ensure_images(engine: Engine, directory: Path) -> list[str]:
    """Make the base images exist; return the names of those that were built from Debian.

    An image that is there, or that a registry gives, is left as it is.
    """
    wanted = {
        python_image(): "python",
        compose_image("prometheus"): "prometheus",
        compose_image("alertmanager"): "alertmanager",
    }
    missing = [name for name in wanted if not engine.has_image(name)]
    if _pull(engine, missing):
        return []
    if missing and not engine.has_image(BOOKWORM):
        with _bookworm().open("rb") as tar:
            engine.run("docker", "import", "-", BOOKWORM, stdin=tar, timeout_s=120)
    for name in missing:
        context = directory / wanted[name]
        context.mkdir()
        shutil.copy(HERE / f"{wanted[name]}.Dockerfile", context / "Dockerfile")
        if wanted[name] == "python":
            _write_pip_settings(context)
        engine.run("docker", "build", "-q", "-t", name, str(context), timeout_s=120)
    return missing


def _pull(engine: Engine, names: Iterable[str]) -> bool:
    """Pull all of them, or none: a registry that does not give the first will not give the rest."""
    try:
        for name in names:
            engine.run("docker", "pull", "-q", name, timeout_s=60)
    except AssertionError:
        return False
    return True


def _bookworm() -> Path:
    """Return the tar file of a minimal Debian with PACKAGES, kept between sessions in the user's cache."""
    if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
        raise Unavailable("no registry answers, and building base images takes root and mmdebstrap")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuwatch-tests"
    key = hashlib.sha256(" ".join(("mmdebstrap", MIRROR, *PACKAGES)).encode()).hexdigest()[:12]
    tar = cache / f"bookworm-{key}.tar"
    if tar.exists():
        return tar
    cache.mkdir(parents=True, exist_ok=True)
    part = tar.with_suffix(f".{os.getpid()}.tar")  # mmdebstrap chooses the format by the name
    unread = ("doc", "man", "locale", "javascript")  # the last is Prometheus's, for pages that no test opens
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in unread]
    log = subprocess.run(
        [
            "mmdebstrap",
            "--variant=minbase",
            f"--include={','.join(PACKAGES)}",
            *excluded,
            "bookworm",
            str(part),
            MIRROR,
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    if log.returncode != 0:
        raise Unavailable(f"mmdebstrap failed:\n{(log.stdout + log.stderr)[-2000:]}")
    part.replace(tar)
    return tar


def _write_pip_settings(context: Path) -> None:
    """Write pip.conf and a certificate bundle, so that pip inside reaches the index that pip outside reaches.

    A build behind a company's proxy or certificate authority needs both. Settings that name local paths stay out.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = dict(re.findall(r"^[^=]*\.([a-z-]+)='(.*)'$", listed, re.MULTILINE))
    lines = [
        f"{name} = {settings[name]}"
        for name in ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout", "timeout")
        if settings.get(name) and "file:" not in settings[name]
    ]
    bundle = Path(settings.get("cert") or "/etc/ssl/certs/ca-certificates.crt")
    (context / "ca-certificates.crt").write_bytes(bundle.read_bytes())
    lines.append("cert = /etc/ssl/certs/ca-certificates.crt")
    (context / "pip.conf").write_text("\n".join(("[global]", *lines, "")))
