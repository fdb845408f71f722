"""What a terminal sends, as names of keys."""

from __future__ import annotations

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page_up", b"\x1b[6~": "page_down",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
}  # fmt: skip
_PLAIN = {b"\r": "enter", b"\n": "enter", b" ": "page_down", b"\x04": "q", b"\x0c": "redraw"}
LETTERS = {"j": "down", "k": "up"}


def decode(data: bytes) -> list[str]:
    """Return the keys of what was read at once; sequences that mean nothing here are passed over whole."""
    keys = []
    while data:
        if data[:1] == b"\x1b":
            known = next((s for s in _SEQUENCES if data.startswith(s)), None)
            length = len(known) if known else _length_of_sequence(data)
            if known:
                keys.append(_SEQUENCES[known])
            elif length == 1:
                keys.append("escape")
        else:
            length = 1
            letter = data[:1].decode("ascii", "replace")
            keys.append(_PLAIN.get(data[:1]) or LETTERS.get(letter, letter))
        data = data[length:]
    return keys


def _length_of_sequence(data: bytes) -> int:
    """Return how many bytes an unknown sequence takes: to its final byte (ECMA-48, 5.4), or two of Alt with a key."""
    if len(data) < 2 or data[1:2] == b"\x1b":
        return 1
    if data[1:2] not in (b"[", b"O"):
        return 2
    for at in range(2, len(data)):
        if 0x40 <= data[at] <= 0x7E:
            return at + 1
    return len(data)
