"""What every test of the integrations needs: frameworks' warnings ignored, no agent, torch warmed up before timing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.integrations.workload import Truth, require, warm_up

FRAMEWORK_WARNINGS = [
    "ignore::DeprecationWarning:lightning",
    "ignore::DeprecationWarning:pytorch_lightning",
    "ignore::FutureWarning:lightning",
    "ignore::FutureWarning:pytorch_lightning",
    "ignore:.*does not have many workers.*:UserWarning",
    "ignore:.*pkg_resources.*",
    "ignore:The dirpath has changed.*:UserWarning",
    "ignore:.*isinstance.*LeafSpec.*",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integrations" in item.path.parts:
            for warning in FRAMEWORK_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def warm() -> None:
    require("torch")
    warm_up()


@pytest.fixture
def truth(warm: None) -> Truth:
    return Truth()


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUWATCH_ENDPOINT", "ipc:///nonexistent/hook.sock")
    yield
    from gpuwatch.hook.watch import open_watches as _open_watches

    left = list(_open_watches)
    for watch in left:
        watch.close()
    assert left == []
