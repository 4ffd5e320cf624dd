"""Every error a person can meet, as a type that carries one sentence and the way out.

The command line prints `str(error)` and exits with `exit_code`; nothing else formats errors.
"""

from __future__ import annotations


class TktuneError(Exception):
    """An error with a sentence for people. `exit_code` 1: the work failed; 2: the words were wrong."""

    exit_code = 1

    def __init__(self, sentence: str, way_out: str = "") -> None:
        self.sentence = sentence
        self.way_out = way_out
        super().__init__(f"{sentence} {way_out}".strip())


class WordsError(TktuneError):
    """What the user wrote cannot be understood or cannot be meant (exit code 2)."""

    exit_code = 2


class StudyError(WordsError):
    """A study file is missing, unreadable, or has a field that is unknown, missing or wrong."""


class ProblemError(WordsError):
    """A problem whose shapes, world or routing contradict each other."""


class RoutingError(WordsError):
    """A routing specification that cannot be parsed or a trace that does not fit the problem."""


class NothingFeasible(WordsError):
    """A space in which no config passes; names the binding constraint and the smallest relaxation."""


class DeviceAbsent(WordsError):
    """A device, backend or device class that is not there."""


class WorkError(TktuneError):
    """Work that was well asked for and failed (exit code 1)."""


class DatabaseError(WorkError):
    """The database cannot be opened, read or written."""


class NewerSchema(DatabaseError):
    """The database was made by a newer version of tktune."""


class AlreadyMeasured(WorkError):
    """A config that must not be launched again: it has its verdict, runs just now, or is quarantined.

    `status` is the standing one ("started" while it runs).
    """

    def __init__(self, status: str, sentence: str, way_out: str = "") -> None:
        self.status = status
        super().__init__(sentence, way_out)


class CacheError(WorkError):
    """The artifact cache is not ours, not writable, or full."""


class ArtifactError(WorkError):
    """An artifact is missing, truncated, altered, or was made for another machine."""


class ToolchainError(WorkError):
    """A compiler is missing or does not answer."""


class GangError(WorkError):
    """A gang could not be started, or died in a way that is no verdict on a config."""


class RanksDisagree(WorkError):
    """Ranks hold different configs, artifacts or versions; raised on every rank."""


class ConstraintRefused(WorkError):
    """A config breaks a named constraint or deadlock rule and is not launched."""

    def __init__(self, rule: str, sentence: str, way_out: str = "") -> None:
        self.rule = rule
        super().__init__(sentence, way_out)


class LaunchFailed(WorkError):
    """A launch ended without its result: `code` says how ("aborted", "spin_limit", a device error code)."""

    def __init__(self, sentence: str, way_out: str = "", code: str = "") -> None:
        self.code = code
        super().__init__(sentence, way_out)


class DeviceError(WorkError):
    """A call of the device's driver failed; `code` is the driver's own name for the error."""

    def __init__(self, sentence: str, way_out: str = "", code: str = "") -> None:
        self.code = code
        super().__init__(sentence, way_out)
