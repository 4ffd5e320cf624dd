"""What a family's cost model says of every feasible config, reckoned by a process of its own: in the driver it would take the
interpreter for seconds in which ranks wait.

    python -m tktune.search.estimating      reads one line of JSON, writes 8 bytes a config
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Space
from tktune.families.base import Family, family
from tktune.families.link_model import first_known, informed

if TYPE_CHECKING:
    from tktune.core.config import Config
    from tktune.search.coordinates import Floats


def estimates_us(
    of: Family, space: Space, facts: Iterable[Mapping[str, Any]], configs: Sequence[Config]
) -> Floats:
    """(configs,): microseconds by the family's cost model, with the newest `facts` of the device's link that are known."""
    model = informed(of, first_known(facts))
    each = (model.cost_us(config, space.problem, space.device) for config in configs)
    return np.fromiter(each, np.float64, len(configs))


class Estimating:
    """`estimates_us` of the whole feasible set of a space, under way in a process that begins at once.

    >>> with Estimating("dispatch_gemm", space, [], {}) as under_way:              # doctest: +SKIP
    ...     us = under_way.result(len(space.feasible))
    """

    def __init__(
        self,
        family_name: str,
        space: Space,
        facts: Iterable[Mapping[str, Any]],
        pins: Mapping[str, Sequence[Any]],
    ) -> None:
        asked = {
            "family": family_name,
            "problem": dataclasses.asdict(space.problem),
            "device": dataclasses.asdict(space.device),
            "facts": list(facts),
            "pins": {name: list(values) for name, values in pins.items()},
        }
        path = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100 - as the interpreter reads it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tktune.search.estimating"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # an interrupt is the driver's affair
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as words:  # it died; `result` says so
            words.write(json.dumps(asked).encode() + b"\n")

    def __enter__(self) -> Estimating:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self, count: int) -> Floats | None:
        """Wait for them: one a config, in the order of the feasible set; None where the process did not come to an end."""
        assert self._process.stdout is not None
        with self._process.stdout as answer:
            found = np.frombuffer(answer.read(), np.float64)
        return found if self._process.wait() == 0 and len(found) == count else None

    def close(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> int:
    asked = json.loads(sys.stdin.readline())
    of = family(asked["family"])
    space = of.space(Problem(**asked["problem"]), DeviceClass(**asked["device"]))
    space = space.restrict(asked["pins"]) if asked["pins"] else space
    found = estimates_us(of, space, asked["facts"], space.feasible.configs)
    sys.stdout.buffer.write(found.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
