"""The control page as kernels of this device see it: the abort word, this rank's spin report, and what a launch that
ended without its result is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tktune.core.errors import DeviceError, LaunchFailed
from tktune.families.control_page import SLOT_BYTES, ControlPage
from tktune.families.cuda.driver import MappedHost
from tktune.families.cuda.gemm_globals import Guard

_AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


class Control:
    """`page`, registered with the device. `guard` is what every launch of `rank` carries."""

    def __init__(self, page: ControlPage, rank: int, spin_limit_s: float) -> None:
        self.page = page
        self._rank = rank
        self._mapped = MappedHost(page.abort_address, SLOT_BYTES * (1 + page.world))
        self.guard = Guard(
            spin_limit_s,
            rank,
            self._mapped.device(page.address(rank)),
            self._mapped.device(page.abort_address),
        )

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around launches and the wait for them: raises `LaunchFailed` for a fault, and for an abort afterwards."""
        try:
            yield
        except DeviceError as error:
            raise self._failed(error.code) from error
        except _AcceleratorError as error:
            raise self._failed(str(error).splitlines()[0]) from error
        if self.page.aborted:
            raise LaunchFailed(f"Rank {self._rank}'s launch was told to abort.", code="aborted")

    def _failed(self, code: str) -> LaunchFailed:
        report = self.page.report(self._rank)
        if report is None:
            return LaunchFailed(
                f"Rank {self._rank}'s launch faulted: {code}.",
                "Run it once under compute-sanitizer.",
                code=code if code.isidentifier() else "device_error",
            )
        return LaunchFailed(
            f"Rank {self._rank}'s {report.role} in block {report.block} gave up waiting for {report.word}"
            f"[{report.index}]: {report.expected} was expected, {report.seen} was there.",
            "Look for the supplier of that word.",
            code="spin_limit",
        )

    def close(self) -> None:
        self._mapped.close()
