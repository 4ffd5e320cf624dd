"""What GPU tests share: this host's device class, a cache of artifacts, and whether ranks share a GPU. Without a GPU all of
them are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_places import GPUS, SHARED, kept_cache
from gpu_variants import prebuild

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.sharing import VARIABLE


def pytest_report_header() -> list[str]:
    if SHARED:
        return [f"one GPU: ranks take turns on it (set {VARIABLE}=0 to skip their tests); nothing is timed"]
    return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not GPUS:
                item.add_marker(pytest.mark.skip(reason="no GPU answers on this host"))


@pytest.fixture(scope="module", autouse=True)
def ranks_may_share() -> Iterator[None]:
    """While a module of this folder runs: gangs and programs that are started see it."""
    with pytest.MonkeyPatch.context() as patch:
        if SHARED:
            patch.setenv(VARIABLE, "1")
        yield


@pytest.fixture(scope="session")
def device() -> DeviceClass:
    return cuda_device_classes()[0]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, device: DeviceClass) -> ArtifactCache:
    made = kept_cache(tmp_path_factory.mktemp("cache"))
    prebuild(made, device)
    return made
