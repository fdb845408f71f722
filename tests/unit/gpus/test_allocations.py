"""Which job or pod has which GPU: the folder's files, the kubelet's answer, and what they say of each GPU."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from gpuwatch_agent.collectors.drivers import GpuDevice
from gpuwatch_agent.gpus.allocations import (
    NOT_KNOWN,
    Allocation,
    AllocationWatch,
    by_gpu,
    completed,
    parse_list,
    read_folder,
)
from gpuwatch_agent.processes.owners import Owner
from tests.pod_resources import Devices, encode

FIRST = GpuDevice(0, "GPU-a", "NVIDIA H100", "00000000:3B:00.0", 3)
SECOND = GpuDevice(1, "GPU-b", "NVIDIA H100", "00000000:5E:00.0", 0)
DEVICES = (FIRST, SECOND)
ALICE = Owner("alice", "4711", account="vision")


def write(folder: Path, name: str, content: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def owners(*allocations: Allocation) -> dict[str, tuple[Owner, ...]]:
    return by_gpu(allocations, DEVICES)


def test_job_has_gpus_by_the_numbers_of_their_device_files(tmp_path: Path) -> None:
    write(tmp_path, "4711.json", {"gpus": [3], "job": "4711", "user": "alice", "account": "vision"})
    write(tmp_path, ".5.json", "half writ")
    assert owners(*(read_folder(tmp_path) or ())) == {"GPU-a": (ALICE,), "GPU-b": ()}


def test_gpus_as_slurm_lists_them(tmp_path: Path) -> None:
    write(tmp_path, "4711.json", {"gpus": ["0,2-4"], "job": "4711"})
    write(tmp_path, "4712.json", {"gpus": ["5, 7-8", "GPU-a, GPU-b"], "job": "4712"})
    assert [allocation.gpus for allocation in read_folder(tmp_path) or ()] == [
        ("0", "2", "3", "4"),
        ("5", "7", "8", "GPU-a", "GPU-b"),
    ]


def test_more_files_than_are_read_make_no_gpu_free(tmp_path: Path) -> None:
    for number in range(513):
        write(tmp_path, f"{number}.json", {"gpus": ["GPU-a"], "job": "4711"})
    warnings: list[str] = []
    found = read_folder(tmp_path, warnings.append) or []
    assert found[0] is NOT_KNOWN and "GPU-b" not in owners(*found) and "513 files" in warnings[0]


@pytest.mark.parametrize("name", ["nvidia3", "nvidia3/vgpu1"])
def test_a_gpu_as_the_device_plugin_of_gke_names_it(name: str) -> None:
    """By its device file, with its time slice: pkg/gpu/nvidia/gpusharing of container-engine-accelerators."""
    assert owners(Allocation((name,), ALICE, by_index=True)) == {"GPU-a": (ALICE,), "GPU-b": ()}


@pytest.mark.parametrize("name", ["GPU-of-another-node", "1"])  # 1 is an index here, but no /dev/nvidia1
def test_an_id_of_no_gpu_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    write(tmp_path, "1.json", {"gpus": [name, 3], "job": "4711", "user": "alice", "account": "vision"})
    now = [100.0]
    watch = AllocationWatch(tmp_path, tmp_path / "kubelet.sock", clock=lambda: now[0])
    for _ in range(3):
        assert watch.tick(DEVICES, 60) == {"GPU-a": (ALICE,)}
        now[0] += 10
    assert [record.message for record in caplog.records] == [
        f"{name!r} is allocated, but no GPU here has this id: no GPU counts as free"
    ]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        {"gpus": [0]},
        {"gpus": [0], "job": ""},
        {"gpus": "0", "job": "1"},
        {"gpus": ["1-2-3"], "job": "1"},
        {"gpus": ["0,5-3"], "job": "1"},
        {"gpus": [" "], "job": "1"},
        {"gpus": ["9" * 9000], "job": "1"},
        {"gpus": [0], "job": "x" * 129},
        '{"gpus": [0], "job": "1", "more": ' + 30_000 * "[" + 30_000 * "]" + "}",
    ],
)
def test_file_that_cannot_be_used_makes_no_gpu_free_and_leaves_the_others(tmp_path: Path, content: object) -> None:
    write(tmp_path, "1.json", content)
    write(tmp_path, "4711.json", {"gpus": ["GPU-a"], "job": "4711", "user": "alice", "account": "vision"})
    warnings: list[str] = []
    found = read_folder(tmp_path, warnings.append) or []
    assert found[0] is NOT_KNOWN and owners(*found) == {"GPU-a": (ALICE,)}
    assert len(warnings) == 1 and f"{tmp_path}/1.json cannot be used" in warnings[0]


@pytest.mark.parametrize("has_writer", [False, True])
def test_pipe_in_the_folder_blocks_nothing(tmp_path: Path, has_writer: bool) -> None:
    os.mkfifo(tmp_path / "1.json")
    write(tmp_path, "4711.json", {"gpus": ["GPU-a"], "job": "4711", "user": "alice", "account": "vision"})
    writer = os.open(tmp_path / "1.json", os.O_RDWR) if has_writer else None
    found: list[Allocation] = []
    reader = threading.Thread(target=lambda: found.extend(read_folder(tmp_path) or ()), daemon=True)
    reader.start()
    reader.join(60)
    assert found and found[0] is NOT_KNOWN and owners(*found) == {"GPU-a": (ALICE,)}
    if writer is not None:
        os.close(writer)


def test_file_of_another_user_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "1.json", {"gpus": [0], "job": "1", "user": "mallory"})
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setattr(os, "fstat", lambda number: os.stat_result((0o644, 0, 0, 1, 1001, 0, 0, 0, 0, 0)))
    warnings: list[str] = []
    assert read_folder(tmp_path, warnings.append) == [NOT_KNOWN] and "another user" in warnings[0]


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("GPU-b", "GPU-b"),
        ("1", "GPU-b"),  # the device plugin counts as NVML does
        ("GPU-a::3", "GPU-a"),  # a time slice
        ("0000:5e:00.0", "GPU-b"),
        ("00000000:5E:00.0", "GPU-b"),
        ("gpu-B", "GPU-b"),
        ("b", "GPU-b"),
    ],
)
def test_ids_of_device_plugins(name: str, uuid: str) -> None:
    found = owners(Allocation((name,), Owner(pod="train-0"), by_index=True))
    assert [each for each in found if found[each]] == [uuid] and len(found) == 2


def test_mig_instances_have_owners_of_their_own_and_that_of_the_whole_gpu() -> None:
    train = GpuDevice("0:0", "MIG-5c1b", "NVIDIA H100 MIG 3g.40gb", FIRST.pci_bus_id, None, ("1", "3g.40gb"), 3 / 7)
    other = GpuDevice("0:1", "MIG-77aa", "NVIDIA H100 MIG 2g.20gb", FIRST.pci_bus_id, None, ("5", "2g.20gb"), 2 / 7)
    bob, devices = Owner("bob", "9"), (FIRST, train, other, SECOND)
    free: dict[str, tuple[Owner, ...]] = dict.fromkeys(("GPU-a", "MIG-5c1b", "MIG-77aa", "GPU-b"), ())
    for name in ("MIG-77aa", "0:1"):
        assert by_gpu([Allocation((name,), bob, by_index=True)], devices) == {**free, "MIG-77aa": (bob,)}
    whole = {"GPU-a": (ALICE,), "MIG-5c1b": (ALICE,), "MIG-77aa": (ALICE, bob)}
    for name in ("GPU-a", "3", "0000:3b:00.0"):
        assert by_gpu([Allocation((name,), ALICE), Allocation(("MIG-77aa",), bob)], devices) == {**free, **whole}
    assert by_gpu([Allocation(("MIG-of-another-node",), ALICE)], devices) == {}


def test_gpu_of_several_and_an_id_of_none() -> None:
    bob = Owner("bob", "9")
    found = owners(Allocation(("GPU-a",), ALICE), Allocation(("GPU-a",), bob), Allocation(("GPU-a",), bob))
    assert found == {"GPU-a": (ALICE, bob), "GPU-b": ()}
    assert owners(Allocation(("MIG-5c1b", "GPU-a"), ALICE)) == {"GPU-a": (ALICE,)}  # whose instance it is is not known


def test_answer_of_the_kubelet() -> None:
    pods = [
        Devices("vision", "train-0", "trainer", "nvidia.com/gpu", ("GPU-a", "GPU-b")),
        Devices("vision", "train-0", "trainer", "rdma/hca", ("mlx5_0",)),
        Devices("web", "shop-7", "shop", "", ()),
    ]
    assert list(parse_list(encode(pods))) == [pods[0].allocation]
    for cut in range(1, len(encode(pods[:1]))):
        try:
            list(parse_list(encode(pods[:1])[:cut]))
        except ValueError:
            continue
    with pytest.raises(ValueError, match="not a protobuf message"):
        list(parse_list(b"\x0a\xff\xff\xff\xff\x0f"))


@pytest.mark.parametrize(
    ("owner", "allocations", "expected"),
    [
        (Owner("alice"), [Owner(job="4711", account="vision")], Owner("alice", "4711", account="vision")),
        (Owner("alice", "4711.x"), [Owner("bob", "4711")], Owner("alice", "4711.x")),  # the process's own counts more
        (
            Owner("root", pod_uid="u", pod="a-host-name"),
            [Owner(namespace="vision", pod="train-0", container="trainer")],
            Owner("root", pod_uid="u", namespace="vision", pod="train-0", container="trainer"),
        ),
        (Owner("root"), [Owner(namespace="vision", pod="train-0")], Owner("root")),  # not in a pod: the node's own
        (
            Owner("root", pod_uid="u", pod="b"),
            [Owner(namespace="one", pod="a"), Owner(namespace="two", pod="b")],
            Owner("root", pod_uid="u", namespace="two", pod="b"),
        ),
        (
            Owner("root", pod_uid="u", pod=62 * "n"),  # a host name has at most 63 characters, and no dash at its end
            [Owner(namespace="one", pod="a"), Owner(namespace="two", pod=62 * "n" + "-0")],
            Owner("root", pod_uid="u", namespace="two", pod=62 * "n" + "-0"),
        ),
        (Owner("root", pod_uid="u"), [Owner(pod="a"), Owner(pod="b")], Owner("root", pod_uid="u")),
        (Owner("alice"), [], Owner("alice")),
    ],
)
def test_owner_of_a_process_is_completed_by_its_gpus_allocation(
    owner: Owner, allocations: list[Owner], expected: Owner
) -> None:
    assert completed(owner, allocations) == expected


def test_sources_are_asked_every_ten_seconds_and_an_answer_is_good_for_a_minute(tmp_path: Path) -> None:
    now = [100.0]
    watch = AllocationWatch(tmp_path / "jobs", tmp_path / "kubelet.sock", clock=lambda: now[0])
    assert watch.tick(DEVICES, 60) == {}  # no source: it is not known
    write(tmp_path / "jobs", "1.json", {"gpus": ["GPU-a"], "job": "4711", "user": "alice", "account": "vision"})
    now[0] += 9
    assert watch.tick(DEVICES, 60) == {}
    now[0] += 1
    assert watch.tick(DEVICES, 60) == {"GPU-a": (ALICE,), "GPU-b": ()}
    (tmp_path / "kubelet.sock").write_text("not a socket")  # a source that fails: what is free is not known
    for _ in range(6):
        now[0] += 10
        assert watch.tick(DEVICES, 60) == {"GPU-a": (ALICE,), "GPU-b": ()}
    now[0] += 10
    assert watch.tick(DEVICES, 60) == {}
    (tmp_path / "kubelet.sock").unlink()
    (tmp_path / "jobs/1.json").unlink()
    now[0] += 10
    assert watch.tick(DEVICES, 60) == {"GPU-a": (), "GPU-b": ()}
