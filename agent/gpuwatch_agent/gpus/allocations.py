"""Which jobs and pods a scheduler has given each GPU to, used or not: from a folder of files, and from the kubelet.

Each is read every ten seconds in a thread with a deadline. Where an allocation is not certain, no GPU counts as free.

The kubelet answers gRPC's `v1.PodResourcesLister/List` on a Unix socket. No gRPC library is among the agent's
dependencies, and grpcio would double its memory: a call without arguments needs one request of fixed bytes, and of the
answer only the data frames. Memory and CPU lists are skipped. Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK: literal
fields without indexing), gRPC over HTTP2, and api.proto of k8s.io/kubelet/pkg/apis/podresources/v1.
"""

import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuwatch_agent.collectors.drivers import GpuDevice
from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.processes.owners import Owner, printable

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
_DEADLINE_S = 5.0
_GOOD_FOR_S = 60.0
_MOST_FILES = 512
_MOST_BYTES = 65536

Allocations = dict[str, tuple[Owner, ...]]
"""The owners of each GPU by UUID, none for a free one. A GPU that is missing: not known."""
_Text = Annotated[str, Meta(max_length=128)]


class AllocationFile(msgspec.Struct, frozen=True):
    """One file of the folder, JSON: a job and its GPUs on this node. It is there for as long as the job has them."""

    gpus: Annotated[list[str | int], Meta(max_length=128)]
    """UUIDs, of MIG instances too, or the N of /dev/nvidiaN, as in SLURM_JOB_GPUS; "0,3-5" counts as several."""
    job: Annotated[_Text, Meta(min_length=1)]
    user: _Text = ""
    account: _Text = ""


@dataclass(frozen=True)
class Allocation:
    """GPUs of one owner, as their source names them."""

    gpus: tuple[str, ...]
    owner: Owner
    by_index: bool = False  # whether a number is the driver's index, else that of the device file


NOT_KNOWN = Allocation(("?",), Owner())  # an unknown GPU is allocated


def read_folder(folder: Path, warn: Callable[[str], None] = log.warning) -> list[Allocation] | None:
    """Return what a folder's files say; `NOT_KNOWN` for one that is invalid, or is not of root or the agent's user.

    None where there is no folder. Raises: OSError.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = []
    if len(paths) > _MOST_FILES:
        warn(f"{folder} has {len(paths)} files, of which {_MOST_FILES} are read: no GPU counts as free")
        found.append(NOT_KNOWN)
    for path in paths[:_MOST_FILES]:
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if os.fstat(file.fileno()).st_uid not in (0, os.getuid()):
                    raise PermissionError("it belongs to another user than root")
                content = msgspec.json.decode(file.read(_MOST_BYTES) or b"", type=AllocationFile)  # None of a pipe
            names = tuple(name for each in content.gpus for name in _expand(str(each)))
        except FileNotFoundError:
            continue  # its job ended meanwhile
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            warn(f"{path} cannot be used: {error}; docs/deploy/allocations.md shows one")
            found.append(NOT_KNOWN)
            continue
        owner = Owner(printable(content.user), printable(content.job), account=printable(content.account))
        found.append(Allocation(names, owner))
    return found


def read_kubelet(path: Path, timeout_s: float = _DEADLINE_S - 1) -> list[Allocation] | None:
    """Return which GPUs the kubelet has given to containers; None where its socket is absent.

    Raises: OSError for one that does not answer, or not as gRPC does; ValueError for an odd answer.
    """
    return list(parse_list(_call(path, timeout_s))) if path.exists() else None


def _expand(name: str) -> list[str]:
    """Return "0,3-5" as ["0", "3", "4", "5"], and "MIG-a, MIG-b" as these two. Raises: ValueError."""
    spans: list[Sequence[object]] = []
    for part in filter(None, map(str.strip, name.split(","))):
        first, _, last = part.partition("-")
        is_number = set(part) <= set("0123456789-")
        spans.append(range(int(first), min(int(last or first), 1023) + 1) if is_number else (part,))
    if not spans or not all(spans):
        raise ValueError(f"{name!r} names no GPU")
    return [str(each) for span in spans for each in span]


def by_gpu(
    allocations: Iterable[Allocation], devices: Sequence[GpuDevice], warn: Callable[[str], None] = log.warning
) -> Allocations:
    """Return the owners of each GPU and MIG instance: who has a whole GPU has its instances.

    With an id that is none of the GPUs', those without an owner are left out: whether they are free is not known.
    """
    owners: dict[str, list[Owner]] = {device.uuid: [] for device in devices}
    unknown = set[str]()
    for allocation in allocations:
        for name in allocation.gpus:
            named = _named(name, allocation.by_index, devices)
            if not named:
                unknown.add(name)
            for uuid in named:
                if allocation.owner not in owners[uuid]:
                    owners[uuid].append(allocation.owner)
    found = {uuid: tuple(of) for uuid, of in owners.items() if of or not unknown}
    for name in sorted(unknown.difference(NOT_KNOWN.gpus)) if len(found) < len(devices) else ():
        warn(f"{name!r} is allocated, but no GPU here has this id: no GPU counts as free")
    return found


def _named(name: str, by_index: bool, devices: Sequence[GpuDevice]) -> list[str]:
    """Return the UUIDs of an id: UUID, PCI address, number ("0:1": an instance), device file or time slice."""
    name = name.partition("::")[0].partition("/vgpu")[0].lower()  # "UUID::2"; GKE: "nvidia0/vgpu1"
    found, instances = list[str](), "-"
    for device in devices:
        number = device.index if by_index or device.minor is None else device.minor
        pci, uuid = device.pci_bus_id.lower(), device.uuid.lower()
        is_named = name and name in (uuid, uuid.partition("-")[2], str(number), f"nvidia{device.minor}", pci, pci[4:])
        if (is_named and not found) or str(device.index).startswith(instances):
            instances = instances if found else f"{device.index}:"
            found.append(device.uuid)
    return found


class AllocationWatch:
    """Asks both sources, in a thread; owned by the sampler's."""

    def __init__(self, folder: Path, kubelet: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._warn = cache(partial(log.warning, "%s"))  # each message once
        self._folder, self._kubelet = folder, kubelet
        self._thread = DeadlineThread("a source of allocations", 2 * _DEADLINE_S)
        self._due_s = float("-inf")
        self._taken: tuple[float, list[Allocation]] | None = None

    def tick(self, devices: Sequence[GpuDevice], wait_s: float = 0.05) -> Allocations:
        """Return each GPU's owners in the last answer, at most a minute old; none without sources or if one fails."""
        now_s = self._clock()
        if now_s >= self._due_s:
            try:
                if (answer := self._thread.offer(self._ask, wait_s)) is not None:
                    self._due_s, self._taken = now_s + INTERVAL_S, (now_s, answer)
            except Exception as error:  # whatever is wrong with it, the GPUs' ledgers go on
                self._due_s = now_s + INTERVAL_S
                self._warn(f"the allocation of GPUs to jobs is unknown: {error}")
        if self._taken is None or now_s - self._taken[0] > _GOOD_FOR_S:
            return {}
        return by_gpu(self._taken[1], devices, self._warn)

    def _ask(self) -> list[Allocation]:
        """Return what the sources that exist say; `NOT_KNOWN` where none does. Raises: what one that fails raises."""
        of_folder, of_kubelet = read_folder(self._folder, self._warn), read_kubelet(self._kubelet)
        is_known = of_folder is not None or of_kubelet is not None
        return [*(of_folder or ()), *(of_kubelet or ())] if is_known else [NOT_KNOWN]


def completed(owner: Owner, allocations: Sequence[Owner]) -> Owner:
    """Return a process's owner with what its GPU's allocation adds: the job, or a pod's name, namespace and container.

    For a pod the kubelet counts more than the process's environment; of several allocations, the same pod's or job's.
    """
    if len(allocations) > 1:
        same = {(owner.pod, ""), ("", owner.job)} - {("", "")}  # a pod's name may be its host name, which is cut
        allocations = [each for each in allocations if {(each.pod, each.job), (each.pod[:63].rstrip("-."), "")} & same]
    if len(allocations) != 1 or bool(allocations[0].pod) != bool(owner.pod_uid):
        return owner
    known = {name: value for name, value in msgspec.structs.asdict(allocations[0]).items() if value}
    if not owner.pod_uid:
        known = {name: value for name, value in known.items() if not getattr(owner, name)}
    return msgspec.structs.replace(owner, **known)


_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_MOST_REPLY_BYTES = 16 << 20
"""Of an answer; also the window that the kubelet is given, so that it never waits for an update."""
_HEADER_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/v1.PodResourcesLister/List",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def _text_field(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


_FIELDS = b"".join(b"\0" + _text_field(name) + _text_field(value) for name, value in _HEADER_FIELDS.items())
_REQUEST = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_SETTINGS, 0, 0, struct.pack(">HIHI", 2, 0, 4, _MOST_REPLY_BYTES))  # no push; each stream's window
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST_REPLY_BYTES))
    + _frame(_HEADERS, _END_HEADERS, 1, _FIELDS)
    + _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, 0))  # an empty message
)


def _call(path: Path, timeout_s: float) -> bytes:
    """Return the answer's message. Raises: OSError."""
    end_s = time.monotonic() + timeout_s
    data = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(_REQUEST)
        flags = stream = 0
        while not (stream == 1 and flags & _END_STREAM):
            head = _receive(connection, 9, end_s)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            length = int.from_bytes(head[:3], "big")
            if length > _MOST_REPLY_BYTES or len(data) > _MOST_REPLY_BYTES:
                raise OSError(f"{path}: the answer is larger than {_MOST_REPLY_BYTES >> 20} MiB")
            body = _receive(connection, length, end_s)
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                connection.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
            elif kind in (_GOAWAY, _RST_STREAM):
                raise OSError(f"{path}: the kubelet closed the call, HTTP/2 error {int.from_bytes(body[-4:], 'big')}")
            elif kind == _DATA and stream == 1:
                data += body[1 : length - body[0]] if flags & _PADDED else body
    # Without a message the status is in the headers, compressed: an unknown method, or too many calls.
    length = int.from_bytes(data[1:5], "big")
    if len(data) < 5 + length or data[0]:
        raise OSError(f"{path}: no answer to {_HEADER_FIELDS[':path']}; Kubernetes has it since 1.20")
    return data[5 : 5 + length]


def _receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        if (left_s := end_s - time.monotonic()) <= 0:  # it may send for ever
            raise TimeoutError("the kubelet's answer does not end")
        connection.settimeout(left_s)
        if not (more := connection.recv(count - len(found))):
            raise OSError("the kubelet closed the connection")
        found += more
    return bytes(found)


def parse_list(message: bytes) -> Iterator[Allocation]:
    """Yield the GPUs of each container in a ListPodResourcesResponse. Raises: ValueError."""
    for pod in _messages(message, 1):
        for container in _messages(pod, 3):
            owner = Owner(namespace=_string(pod, 2), pod=_string(pod, 1), container=_string(container, 1))
            for devices in _messages(container, 2):
                ids = tuple(each.decode("utf-8", "replace") for each in _messages(devices, 2))
                is_gpu = _string(devices, 1).startswith(("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu"))
                if is_gpu or any(each.startswith(("GPU-", "MIG-")) for each in ids):
                    yield Allocation(ids, owner, by_index=True)


def _string(message: bytes, number: int) -> str:
    return next((each.decode("utf-8", "replace") for each in _messages(message, number)), "")


def _messages(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field of strings or messages. Source: protobuf.dev, encoding."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if length < 0 or at + length > len(message):
            raise ValueError("not a protobuf message")
        if key >> 3 == number and kind == 2:
            yield message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return (the number that begins here, where the next one begins)."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("not a protobuf message")
