"""The closed set of ways a trial can end."""

from __future__ import annotations

import re

OK = "ok"
CENSORED = "censored"  # clearly slower, stopped early
WRONG = "wrong"
BUILD_FAILED = "build_failed"
CRASHED = "crashed"  # a rank process died
ABANDONED = "abandoned"  # the user stopped the run
LOST = "lost"  # the driver or the host vanished while it ran

_PLAIN = frozenset({OK, CENSORED, WRONG, BUILD_FAILED, CRASHED, ABANDONED, LOST})
_WITH_DETAIL = re.compile(r"(refused|timeout|fault):[A-Za-z0-9_.+-]+")


def refused(rule: str) -> str:
    """A constraint or deadlock rule refused the config before any launch."""
    return checked(f"refused:{rule}")


def timeout(command: str) -> str:
    """A rank did not answer a command by its deadline."""
    return checked(f"timeout:{command}")


def fault(code: str) -> str:
    """A launch faulted: spin_limit, aborted, an exception's name, a device error code."""
    return checked(f"fault:{code}")


def checked(status: str) -> str:
    """`status` itself when it is in the closed set; ValueError otherwise."""
    if status in _PLAIN or _WITH_DETAIL.fullmatch(status):
        return status
    raise ValueError(f"{status!r} is not a status")


def is_final(status: str) -> bool:
    """Whether the verdict stands for good. The others may be tried once more, then the config is quarantined."""
    return status in (OK, CENSORED, WRONG, BUILD_FAILED) or status.startswith("refused:")


def ends_the_gang(status: str) -> bool:
    """Whether the gang that measured it had to be killed."""
    return status == CRASHED or status.startswith(("timeout:", "fault:"))
