"""`tktune lookup`: the config that a program would get for a problem, without tuning or compiling anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.errors import WorkError
from tktune.report.text import time_text

if TYPE_CHECKING:
    from tktune.runtime.choice import Choice

EXAMPLE = (
    "Example: tktune lookup --family dispatch_gemm --hidden 256 --cols 256 --experts 8 --top-k 2 "
    "--tokens 128 --world 2 --json"
)


def choice_command(show: Callable[[Choice, bool], None], purpose: str) -> Callable[..., None]:
    """A command that looks a problem up and shows the choice; `lookup` and `explain` take the same words."""

    def command(
        family: options.FamilyName,
        hidden: options.Hidden,
        cols: options.Cols,
        experts: options.Experts,
        top_k: options.TopK,
        tokens: options.Tokens,
        world: options.World = 1,
        dtype: options.Dtype = "bf16",
        weight_layout: options.WeightLayout = "ekn",
        routing: options.RoutingText = "uniform",
        pad: options.Pad = None,
        ep_world: options.EpWorld = None,
        ep_rank: options.EpRank = None,
        finish: options.Finish = "none",
        policy: options.PolicyName = "serving",
        device: options.DeviceName = None,
        db: options.Db = None,
        as_json: options.Json = False,
        debug: options.Debug = False,
    ) -> None:
        from tktune.runtime.lookup import lookup as find

        with warnings.catch_warnings(record=True) as unreadable:
            warnings.simplefilter("always")
            choice = find(
                family,
                hidden=hidden,
                cols=cols,
                experts=experts,
                top_k=top_k,
                tokens=tokens,
                world=world,
                dtype=dtype,
                weight_layout=weight_layout,
                routing=routing,
                pad=pad,
                ep_world=ep_world,
                ep_rank=ep_rank,
                finish=finish,
                policy=policy,
                device=device,
                db=None if db is None else options.database(db),
            )
        if unreadable:
            # A program is served the default with a warning; a person is told, and a script sees the exit code.
            raise WorkError(str(unreadable[0].message))
        show(choice, as_json)

    command.__doc__ = purpose
    return command


def choice_facts(choice: Choice) -> dict[str, Any]:
    """What `--json` prints of a choice."""
    return {
        "config": dict(choice.config),
        "provenance": choice.provenance,
        "time_us": choice.time_us,
        "measured_on": None if choice.measured_on is None else choice.measured_on.key,
        "artifact_digest": choice.artifact_digest,
        "problem": choice.problem.key,
        "device": choice.device.key,
    }


def _show(choice: Choice, as_json: bool) -> None:
    if as_json:
        print_json(choice_facts(choice))
        return
    print(choice.config)
    if choice.time_us is None:
        print(f"{choice.provenance}, not measured here")
    elif choice.measured_on in (None, choice.problem):
        print(f"{choice.provenance}, {time_text(choice.time_us)}")
    else:
        print(f"{choice.provenance}, {time_text(choice.time_us)} on: {choice.measured_on}")


lookup = choice_command(
    _show, "Print the config that a program would get for a problem. Never tunes, never compiles."
)
