"""Clocks and throttle reasons from an NVML that is made up."""

from __future__ import annotations

import sys
import types

import pytest

from tktune.core.device_cuda import pci_bus_id
from tktune.gang import telemetry
from tktune.gang.telemetry import Reading, Telemetry, between


class NVMLError(Exception):
    pass


def fake_nvml(**answers):
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    nvml.NVML_PERF_POLICY_POWER, nvml.NVML_PERF_POLICY_THERMAL = 0, 1
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByPciBusId = lambda address: f"handle of {address}"
    nvml.nvmlDeviceGetClockInfo = lambda handle, which: {1: 1980, 2: 3201}[which]
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 512_000
    nvml.nvmlDeviceGetTemperature = lambda handle, which: 55
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x4 | 0x1
    violation = types.SimpleNamespace(violationTime=7000)
    nvml.nvmlDeviceGetViolationStatus = lambda handle, policy: violation
    for name, answer in answers.items():
        setattr(nvml, name, answer)
    return nvml


def refuse(*_):
    raise NVMLError


@pytest.fixture
def installed(monkeypatch):
    def install(nvml, address="0000:01:00.0"):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(telemetry, "pci_bus_id", lambda index: address)

    return install


def test_a_device_is_read(installed):
    installed(fake_nvml())
    found = Telemetry.open([0])
    assert found.read() == [Reading(1980, 3201, 512_000, 55, 5, 7000, 7000)]


def test_what_a_device_does_not_tell_is_left_open(installed):
    installed(fake_nvml(nvmlDeviceGetViolationStatus=refuse, nvmlDeviceGetPowerUsage=refuse))
    (reading,) = Telemetry.open([0]).read()
    assert (reading.power_mw, reading.power_violation_ns) == (None, None)
    told = between([reading], [reading])
    assert told["power_w"] == told["power_limited_us"] == [None]


def test_without_nvml_there_is_nothing_to_record(installed, monkeypatch):
    installed(fake_nvml(nvmlInit=refuse))
    assert Telemetry.open([0]) is None
    installed(fake_nvml(), address=None)
    assert Telemetry.open([0]) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Telemetry.open([0]) is None


def test_reasons_of_either_end_are_named_and_idleness_is_none():
    before = Reading(1980, 3201, 100_000, 50, 0x1, 1000, 0)
    after = Reading(1700, 3201, 700_000, 60, 0x4 | 0x20 | 0x200, 51_000, 0)
    told = between([before], [after])
    assert told["throttle"] == [["power_cap", "thermal_software", "reason_0x200"]]
    assert told["power_limited_us"] == [50.0] and told["thermal_limited_us"] == [0.0]
    assert told["sm_mhz"] == [1700] and told["power_w"] == [700.0]


class FakeDriver:
    """libcuda with one device, as far as its PCI address goes."""

    def cuDeviceGet(self, handle, ordinal):  # noqa: N802
        return 0 if ordinal == 0 else 101

    def cuDeviceGetPCIBusId(self, buffer, size, handle):  # noqa: N802
        buffer.value = b"0000:01:00.0"
        return 0


def test_a_device_is_found_by_its_pci_address():
    assert pci_bus_id(0, FakeDriver) == "0000:01:00.0"
    assert pci_bus_id(1, FakeDriver) is None
    assert pci_bus_id(0, lambda: None) is None
