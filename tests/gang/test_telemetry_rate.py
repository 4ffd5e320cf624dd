"""What NVML is asked, and how often."""

from __future__ import annotations

from types import SimpleNamespace

from tktune.gang.telemetry import LEAST_APART_S, Telemetry


class NvmlError(Exception):
    pass


def test_devices_are_read_now_and_then_and_what_is_told_is_the_last_stretch():
    now, limited_ns, reads = [100.0], [0], []

    def violation(handle, policy):
        reads.append(handle)
        return SimpleNamespace(violationTime=limited_ns[0])

    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_PERF_POLICY_POWER=0,
        NVML_PERF_POLICY_THERMAL=1,
        NVML_CLOCK_SM=0,
        NVML_CLOCK_MEM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetViolationStatus=violation,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x4,
        nvmlDeviceGetClockInfo=lambda handle, which: 1980 - which,
    )
    telemetry = Telemetry(nvml, ["one", "two"], clock=lambda: now[0])
    first = telemetry.lately()
    assert first["sm_mhz"] == [1980, 1980] and first["power_limited_us"] == [0.0, 0.0]
    assert first["throttle"] == [["power_cap"]] * 2 and first["power_w"] == [None, None]
    assert len(reads) == 4
    limited_ns[0] = 5_000_000
    now[0] += LEAST_APART_S / 2
    assert telemetry.lately() == first and len(reads) == 4
    now[0] += LEAST_APART_S / 2
    assert telemetry.lately()["power_limited_us"] == [5000.0, 5000.0] and len(reads) == 8
    now[0] += 1
    assert telemetry.lately()["power_limited_us"] == [0.0, 0.0]
