"""Numbers as text for people, records as JSON."""

import re
import sys
import unicodedata
import zlib

import msgspec


def harmless(text: str) -> str:
    """Return text with each character that could act on a terminal (escape, bidi, newline) replaced by "·"."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("·" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT as a URL has it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def file_name(run: str) -> str:
    """Return a run's name or id as a part of a file's name, of 80 bytes at most: a longer one ends in its checksum."""
    own = sys.getfilesystemencoding()
    name = re.sub(r"[^\w.-]+", "_", run).encode(own, "replace")
    if len(name) > 80:  # names of a sweep differ in their ends
        name = name[:71] + f"-{zlib.crc32(name):08x}".encode()
    return name.decode(own, "ignore").replace("?", "_")


def percent(ratio: float) -> str:
    """Return e.g. "62%", with one decimal under 10%."""
    return f"{ratio:.0%}" if ratio >= 0.0995 or ratio == 0 else f"{ratio:.1%}"


def duration(seconds: float) -> str:
    """Return e.g. "85 µs", "61 ms", "2.4 s", "3m 12s", "2h 05m"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes}m {int(seconds) % 60:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def size(count: float) -> str:
    """Return e.g. "64 MiB", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if count < 100 else f"{count:.0f} GiB"


def as_json(record: object) -> str:
    """Return a struct, a dataclass or a dictionary as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode()
