"""Device classes: read from files and driver attributes, never from a marketing name."""

from __future__ import annotations

import ctypes

import pytest

from tktune.core.device import DeviceClass, device_class
from tktune.core.device_cpu import KIB, cores_of, cpu_device_class
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import DeviceAbsent, WordsError

V3 = "avx avx2 bmi1 bmi2 f16c fma movbe cx16 popcnt sse4_1 sse4_2 ssse3"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def machine(tmp_path, flags=V3, l2="1024K", shared="0", l3="32M"):
    proc, sysfs = tmp_path / "proc", tmp_path / "sys"
    proc.mkdir()
    (proc / "cpuinfo").write_text(f"model name\t: Chip X\nflags\t\t: {flags}\n\nflags\t\t: \n")
    caches = sysfs / "devices/system/cpu/cpu0/cache"
    entries = [(1, "Data", "48K", "0"), (1, "Instruction", "32K", "0"), (2, "Unified", l2, shared)]
    if l3:
        entries.append((3, "Unified", l3, "0-3"))
    for number, (level, kind, size, cpus) in enumerate(entries):
        folder = caches / f"index{number}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpus)):
            (folder / name).write_text(f"{text}\n")
    return {"proc": proc, "sysfs": sysfs}


@pytest.fixture(autouse=True)
def no_seats(monkeypatch):
    monkeypatch.delenv("TKTUNE_CPU_SEATS", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_a_cpu_is_its_instruction_set_its_cores_and_its_caches(tmp_path):
    found = cpu_device_class(**machine(tmp_path), cores=2)
    assert found == DeviceClass("cpu", "x86-64-v3.2c", 4, 1024 * KIB, 32 * KIB * KIB, "shm")
    assert cores_of(found) == 2
    assert "Chip X" in str(found)


@pytest.mark.parametrize(
    ("files", "arch", "smem", "last"),
    [
        ({"flags": V4}, "x86-64-v4.8c", 1024 * KIB, 32 * KIB * KIB),
        ({"flags": "sse2"}, "x86-64.8c", 1024 * KIB, 32 * KIB * KIB),
        ({"l2": "256K", "shared": "0,1-3"}, "x86-64-v3.8c", 128 * KIB, 32 * KIB * KIB),
        ({"l2": "16M", "l3": ""}, "x86-64-v3.8c", 2048 * KIB, 16 * KIB * KIB),
    ],
)
def test_levels_and_bounds_of_cpus(tmp_path, files, arch, smem, last):
    found = cpu_device_class(**machine(tmp_path, **files), cores=8)
    assert (found.arch, found.smem_optin_bytes, found.l2_bytes) == (arch, smem, last)


def test_a_machine_that_tells_nothing_still_has_a_class(tmp_path):
    found = cpu_device_class(tmp_path / "no", tmp_path / "none", cores=1)
    assert found == DeviceClass("cpu", "x86-64.1c", 4, 1024 * KIB, 32 * KIB * KIB, "shm")


def test_another_machine_is_named_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_device_class(**machine(tmp_path), cores=3).arch == "aarch64.3c"


def test_seats_come_from_the_environment(tmp_path, monkeypatch):
    files = machine(tmp_path)
    monkeypatch.setenv("TKTUNE_CPU_SEATS", "7")
    assert cpu_device_class(**files).sm_count == 7
    for wrong in ("0", "many", "65"):
        monkeypatch.setenv("TKTUNE_CPU_SEATS", wrong)
        with pytest.raises(WordsError, match="TKTUNE_CPU_SEATS"):
            cpu_device_class(**files)


def test_this_machine_has_a_cpu_class_and_names_are_known():
    assert device_class("cpu").backend == "cpu"
    assert device_class("sm_90a").arch == "sm_90a"
    with pytest.raises(WordsError, match="no device class called 'tpu'"):
        device_class("tpu")


def test_a_name_is_shown_and_never_compared():
    one = DeviceClass("cpu", "a", 4, 1, 1, "shm", display_name="one")
    other = DeviceClass("cpu", "a", 4, 1, 1, "shm", display_name="other")
    assert one == other
    assert one.digest == other.digest
    assert str(one) == "one"
    assert cores_of(one) == 1


class FakeDriver:
    """Answers like libcuda for two GPUs of one kind."""

    def __init__(self, capability=(9, 0), access=1, atomics=1, devices=2):
        self.values = {16: 132, 97: 232448, 38: 62914560, 82: 65536, 75: capability[0], 76: capability[1]}
        self.p2p = {2: access, 3: atomics}
        self.devices = devices

    def _set(self, pointer, value):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    def cuDeviceGetCount(self, out):  # noqa: N802
        return self._set(out, self.devices)

    def cuDeviceGet(self, out, ordinal):  # noqa: N802
        return self._set(out, ordinal)

    def cuDeviceGetAttribute(self, out, attribute, handle):  # noqa: N802
        return self._set(out, self.values[attribute])

    def cuDeviceGetName(self, buffer, size, handle):  # noqa: N802
        buffer.value = b"GPU"
        return 0

    def cuDeviceGetP2PAttribute(self, out, attribute, one, other):  # noqa: N802
        assert one.value != other.value
        return self._set(out, self.p2p[attribute])


def test_gpus_are_read_from_driver_attributes():
    found = cuda_device_classes(FakeDriver)
    assert found == [device_class("sm_90a")] * 2
    assert str(found[0]) == "GPU"


@pytest.mark.parametrize(
    ("driver", "arch", "link", "atomics"),
    [
        (FakeDriver((12, 0), atomics=0), "sm_120a", "pcie", False),
        (FakeDriver((8, 9), access=0, atomics=0), "sm_89", "host", False),
        (FakeDriver(devices=1), "sm_90a", "none", True),
    ],
)
def test_links_are_classes(driver, arch, link, atomics):
    found = cuda_device_classes(lambda: driver)[0]
    assert (found.arch, found.interconnect, found.remote_atomics) == (arch, link, atomics)


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    assert cuda_device_classes(lambda: None) == []
    monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", list)
    with pytest.raises(DeviceAbsent, match="No CUDA driver or GPU answers"):
        device_class("cuda")
    monkeypatch.setattr(
        "tktune.core.device_cuda.cuda_device_classes", lambda: cuda_device_classes(FakeDriver)
    )
    assert device_class("cuda").arch == "sm_90a"
