"""`tktune explain`: why a lookup answers as it does, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tktune.cli.lookup import choice_command, choice_facts
from tktune.cli.output import print_json

if TYPE_CHECKING:
    from tktune.runtime.choice import Choice

EXAMPLE = (
    "Example: tktune explain --family dispatch_gemm --hidden 256 --cols 256 --experts 8 --top-k 2 "
    "--tokens 128 --world 2"
)


def _show(choice: Choice, as_json: bool) -> None:
    if as_json:
        print_json({**choice_facts(choice), "explanation": choice.explain()})
    else:
        print(choice.explain())


explain = choice_command(_show, "Say why a lookup answers as it does. What was compared, found and left out.")
