"""The names of files that are named after runs."""

from __future__ import annotations

import pytest

from gpuwatch.formatting import file_name


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("resnet50-a", "resnet50-a"),
        ("lr=0.1/seed 3", "lr_0.1_seed_3"),
        ("../../etc/passwd", ".._.._etc_passwd"),
        ("模型", "模型"),
        ("数据", "数据"),
        ("a\u202eb\x1b", "a_b_"),
        ("模" * 26, "模" * 26),
        ("模" * 100, "模" * 23 + "-abd77b7d"),  # a file system takes 255 bytes with what is around it
    ],
)
def test_letters_of_any_script_stay_and_what_a_file_name_cannot_have_does_not(run: str, name: str) -> None:
    assert file_name(run) == name


def test_long_names_that_differ_in_their_ends_have_files_of_their_own() -> None:
    names = {file_name(f"{'sweep-of-a-large-model-' * 5}lr={rate}") for rate in (0.1, 0.01)}
    assert len(names) == 2 and {len(name) for name in names} == {80}
