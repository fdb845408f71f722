"""Certificates of an authority of our own, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.servers import require

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority in a folder; its own certificate is `path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.path = folder / f"{name}.crt"
        self._openssl("req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")

    def issue(self, name: str, days: int = 2) -> tuple[Path, Path]:
        """Return a certificate for localhost and its key: NAME.crt, NAME.key. It has expired if `days` is negative."""
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", "-addext", names)
        self._openssl("req", *_KEY, *request)
        own = ("-CA", self.path.name, "-CAkey", self.path.with_suffix(".key").name, "-copy_extensions", "copy")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *own, "-days", str(days), "-out", f"{name}.crt")
        return self._folder / f"{name}.crt", self._folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run([require("openssl"), *arguments], cwd=self._folder, check=True, capture_output=True, timeout=60)
