"""Options that several commands share, so that they mean the same and refuse the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tktune.core.errors import WordsError
from tktune.core.problem import LARGEST_NUMBER

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Db = Annotated[
    str | None,
    typer.Option("--db", metavar="URL|FILE", help="The database [default: TKTUNE_DB or the user's own]."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache", metavar="FOLDER", help="The artifact cache [default: TKTUNE_CACHE_DIR or the user's own]."
    ),
]

FamilyName = Annotated[
    str,
    typer.Option("--family", help="The kernel: grouped_gemm, dispatch_gemm, or your own module:ATTRIBUTE."),
]


def number(name: str, meaning: str, smallest: int = 1) -> Any:
    """A whole-number option within what a kernel argument can hold."""
    return typer.Option(name, metavar="N", min=smallest, max=LARGEST_NUMBER, help=meaning)


Hidden = Annotated[int, number("--hidden", "Length of a token row (K).")]
Cols = Annotated[int, number("--cols", "Columns of one expert's output (N).")]
Experts = Annotated[int, number("--experts", "Experts of all ranks.")]
TopK = Annotated[int, number("--top-k", "Experts that each token picks.")]
Tokens = Annotated[int, number("--tokens", "Tokens of each rank.")]
World = Annotated[int, number("--world", "Ranks that work together.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Type of tokens and weights.")]
WeightLayout = Annotated[
    str, typer.Option("--weight-layout", help="ekn: (experts, hidden, cols); enk: (experts, cols, hidden).")
]
RoutingText = Annotated[
    str, typer.Option("--routing", help="uniform, zipf:ALPHA, hot:SHARE[@EXPERT], empty:EXPERT, trace:FILE.")
]
Pad = Annotated[
    int | None, number("--pad", "Rows to which each expert is aligned [default: the best one measured].")
]
EpWorld = Annotated[int | None, number("--ep-world", "grouped_gemm: ranks that share the experts.")]
EpRank = Annotated[int | None, number("--ep-rank", "grouped_gemm: which of them, from 0.", smallest=0)]
Finish = Annotated[
    str,
    typer.Option(
        "--finish", help="none, or swiglu: cols are gate and up, and half as many come out (dispatch_gemm)."
    ),
]
PolicyName = Annotated[str, typer.Option("--policy", help="How it was measured.")]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device class: cpu, cuda, sm_90a, sm_120a, sm_120a-rehearsed [default: the study's, or what is here].",
    ),
]

SamplerName = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        metavar="NAME",
        help="model (gain a second, by a model of all configs), or for comparison tpe (Optuna's) or random.",
    ),
]


def database(db: str | None) -> str:
    """The database as a URL: what the user wrote (a URL or a file), or the default place."""
    from tktune.core.paths import database_url

    if db is None:
        return database_url()
    if not db.strip():
        raise WordsError("--db is empty.", "Give a SQLAlchemy URL or the path of a SQLite file.")
    return db if "://" in db else f"sqlite:///{Path(db).expanduser().absolute()}"


def cache_folder(cache: Path | None) -> Path:
    """The artifact cache's folder: what the user wrote, or the default place."""
    from tktune.core.paths import cache_root

    return cache_root() if cache is None else cache.expanduser().absolute()
