"""What GPU tests share: this host's device class and a cache of artifacts. Without a GPU all of them are skipped."""

from __future__ import annotations

import pytest
from gpu_variants import prebuild

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = cuda_device_classes()
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not found:
                item.add_marker(pytest.mark.skip(reason="no GPU answers on this host"))


@pytest.fixture(scope="session")
def device() -> DeviceClass:
    return cuda_device_classes()[0]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, device: DeviceClass) -> ArtifactCache:
    made = ArtifactCache(tmp_path_factory.mktemp("cache"))
    prebuild(made, device)
    return made
