"""The topology of GPUs as driver attributes and NVML tell it, with stand-ins for both libraries."""

from __future__ import annotations

import types

import pytest

from tktune.core.topology_cuda import Pair, topology


class Driver:
    """Answers like libcuda for `gpus` GPUs; `access` and `atomics` say which ordered pairs have them."""

    def __init__(self, gpus=2, access=lambda a, b: 1, atomics=lambda a, b: 1):
        self.gpus, self.answers = gpus, {1: lambda a, b: a + b, 2: access, 3: atomics}

    def __call__(self):
        return self

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, out, ordinal):  # noqa: N802
        out._obj.value = ordinal
        return 0

    def cuDeviceGetP2PAttribute(self, out, attribute, one, other):  # noqa: N802
        out._obj.value = self.answers[attribute](one.value, other.value)
        return 0

    def cuDriverGetVersion(self, out):  # noqa: N802
        out._obj.value = 13010
        return 0

    def cuDeviceGetPCIBusId(self, buffer, size, handle):  # noqa: N802
        buffer.value = f"0000:0{handle.value}:00.0".encode()
        return 0


class Refused(Exception):
    pass


def nvml(links=18, joined=lambda a, b: True, answers=True):
    """A stand-in for pynvml: handles are PCI addresses."""

    def begin():
        if not answers:
            raise Refused

    def state(handle, link):
        if link >= links:
            raise Refused
        return 1

    return types.SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=begin,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetHandleByPciBusId=lambda address: address,
        nvmlDeviceGetP2PStatus=lambda a, b, index: 0 if index == 2 and joined(a, b) else 1,
        nvmlDeviceGetNvLinkState=state,
    )


def test_there_is_none_without_a_driver():
    assert topology(lambda: None, nvml()) is None


def test_nvlink_is_named_with_its_links():
    found = topology(Driver(), nvml())
    assert found.driver == "580.65.06" and found.gpus == 2
    assert found.pairs == (Pair(0, 1, True, True, 1, 18), Pair(1, 0, True, True, 1, 18))
    assert {pair.over for pair in found.pairs} == {"NVLink (18 links)"} and found.all_reach([0, 1])


def test_pcie_has_access_and_no_atomics():
    found = topology(Driver(atomics=lambda a, b: 0), nvml(joined=lambda a, b: False))
    assert [(pair.over, pair.native_atomics) for pair in found.pairs] == [("PCIe", False)] * 2


def test_pairs_without_access_go_through_the_host():
    found = topology(Driver(3, access=lambda a, b: int({a, b} == {0, 1})), nvml(4))
    assert found.all_reach([0, 1]) and not found.all_reach([0, 1, 2]) and found.all_reach([2])
    over = {(pair.a, pair.b): pair.over for pair in found.pairs}
    assert over[0, 1] == "NVLink (4 links)" and over[1, 2] == "host memory" and len(over) == 6


@pytest.mark.parametrize(("atomics", "over"), [(1, "NVLink"), (0, "PCIe")])
def test_without_nvml_native_atomics_decide(atomics, over):
    found = topology(Driver(atomics=lambda a, b: atomics), nvml(answers=False))
    assert found.driver == "CUDA 13.1"
    assert {pair.over for pair in found.pairs} == {over}
