"""What `run --dry-run` and `studies` show: each problem's feasible set on a device class, with nothing compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import NothingFeasible
from tktune.core.feasible import WaterfallRow
from tktune.core.problem import Problem
from tktune.report.text import aligned, count_text

if TYPE_CHECKING:
    from tktune.search.study import Study


@dataclass(frozen=True)
class ProblemSpace:
    """The space of one problem on one device class. `default` and `refusal` exclude each other."""

    problem: Problem
    device: DeviceClass
    total: int
    feasible: int
    builds: int
    waterfall: tuple[WaterfallRow, ...]
    default: Config | None
    refusal: NothingFeasible | None

    def counts(self) -> dict[str, Any]:
        return {
            "problem": self.problem.key,
            "total": self.total,
            "feasible": self.feasible,
            "builds": self.builds,
        }

    def facts(self) -> dict[str, Any]:
        """What `run --dry-run --json` prints of it."""
        return {
            **self.counts(),
            "device": self.device.key,
            "waterfall": [
                {
                    "constraint": r.name,
                    "meaning": r.meaning,
                    "removed": r.removed,
                    "left": r.left,
                    "example": r.example,
                }
                for r in self.waterfall
            ],
            "default": None if self.default is None else dict(self.default),
            "refusal": None if self.refusal is None else str(self.refusal),
        }

    def text(self) -> str:
        """The picture for people."""
        rows: list[Sequence[Any]] = [
            ["", "removed", "left", ""],
            ["all", "", self.total, "every combination"],
        ]
        rows += [[r.name, f"-{r.removed}", r.left, r.example or r.meaning] for r in self.waterfall]
        end = f"default: {self.default}" if self.refusal is None else str(self.refusal)
        return "\n".join(
            [
                str(self.problem),
                f"{self.device}: {self.feasible} of {count_text(self.total, 'config')} feasible, "
                f"from {count_text(self.builds, 'build')}",
                aligned(rows, right=(1, 2), indent="  "),
                end,
            ]
        )


def space_of(study: Study, problem: Problem, device: DeviceClass) -> ProblemSpace:
    """Count one space of a study. Raises `WordsError` for a pin that names no parameter or value."""
    space = study.space(problem, device)
    found = space.count()
    default, refusal = None, None
    try:
        default = space.default_config()
    except NothingFeasible as error:
        refusal = error
    return ProblemSpace(
        problem, device, found.total, found.feasible, found.builds, found.waterfall, default, refusal
    )
