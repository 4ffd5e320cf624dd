"""Clocks, power and throttle reasons of a gang's GPUs, read by the driver through NVML; no device context is made.

Without pynvml, or where NVML does not answer, there is simply nothing to record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tktune.core.device_cuda import pci_bus_id

LEAST_APART_S = 0.25  # readings in a row
# Bits of nvmlClocksEventReason* that are no reason to doubt a time: idle, and clocks set by an application.
_HARMLESS = 0x1 | 0x2
REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
    0x100: "display",
}


@dataclass(frozen=True)
class Reading:
    """One device now. None where the device does not tell; the violation counters only grow, nanoseconds."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_mw: int | None
    temperature_c: int | None
    reasons: int
    power_violation_ns: int | None
    thermal_violation_ns: int | None


class Telemetry:
    """NVML handles of some devices, by their driver order (which `CUDA_VISIBLE_DEVICES` changes)."""

    def __init__(
        self, nvml: Any, handles: Sequence[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._handles = list(handles)
        self._clock = clock
        self._last: list[Reading] | None = None
        self._read_at = 0.0
        self._lately: dict[str, Any] = {}

    @classmethod
    def open(cls, device_indices: Sequence[int]) -> Telemetry | None:
        """None where pynvml is not installed, NVML does not answer, or a device cannot be found."""
        try:
            import pynvml
        except ImportError:
            return None
        addresses = [pci_bus_id(index) for index in device_indices]
        if None in addresses:
            return None
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
        except pynvml.NVMLError:
            return None
        return cls(pynvml, handles)

    def lately(self) -> dict[str, Any]:
        """What happened between the last two readings (`between`), the latter at most `LEAST_APART_S` old: a reading takes
        milliseconds, in which ranks would wait."""
        now = self._clock()
        if self._last is None or now - self._read_at >= LEAST_APART_S:
            before, self._last, self._read_at = self._last, self.read(), now
            self._lately = between(before or self._last, self._last)
        return self._lately

    def read(self) -> list[Reading]:
        """All devices now."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml

        def ask(name: str, *args: Any) -> Any:
            call = getattr(nvml, name, None)
            if call is None:
                return None
            try:
                return call(handle, *args)
            except nvml.NVMLError:
                return None

        power = ask("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_POWER)
        thermal = ask("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_THERMAL)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Reading(
            ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            ask("nvmlDeviceGetPowerUsage"),
            ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            int(reasons or 0),
            None if power is None else int(power.violationTime),
            None if thermal is None else int(thermal.violationTime),
        )


def between(before: Sequence[Reading], after: Sequence[Reading]) -> dict[str, Any]:
    """What happened between two readings, as plain JSON with one value a device.

    `throttle` names every reason seen at either end; `power_limited_us` and `thermal_limited_us` are how long the
    device was held back meanwhile.
    """
    return {
        "sm_mhz": [one.sm_mhz for one in after],
        "memory_mhz": [one.memory_mhz for one in after],
        "power_w": [None if one.power_mw is None else one.power_mw / 1000 for one in after],
        "temperature_c": [one.temperature_c for one in after],
        "throttle": [_names(first.reasons | last.reasons) for first, last in zip(before, after, strict=True)],
        "power_limited_us": [
            _grown_us(first.power_violation_ns, last.power_violation_ns)
            for first, last in zip(before, after, strict=True)
        ],
        "thermal_limited_us": [
            _grown_us(first.thermal_violation_ns, last.thermal_violation_ns)
            for first, last in zip(before, after, strict=True)
        ],
    }


def _names(reasons: int) -> list[str]:
    bits = [1 << bit for bit in range(reasons.bit_length()) if reasons & (1 << bit) & ~_HARMLESS]
    return [REASONS.get(bit, f"reason_{bit:#x}") for bit in bits]


def _grown_us(before: int | None, after: int | None) -> float | None:
    return None if before is None or after is None else (after - before) / 1000
