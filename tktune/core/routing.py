"""Which experts each token goes to: routing specifications as text, and the seeded draws they stand for.

No kernel and no schedule table lives here. numpy is imported only when something is drawn.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tktune.core.errors import RoutingError

if TYPE_CHECKING:
    from tktune.core.problem import Problem

KINDS = ("uniform", "zipf", "hot", "empty", "one", "trace")
_FORMS = "uniform, zipf:ALPHA, hot:SHARE[@EXPERT], empty:EXPERT[,EXPERT], one:EXPERT, trace:PATH"
_HASH = re.compile(r"(?P<path>.+)#(?P<hash>[0-9a-f]{16})")


@dataclass(frozen=True)
class Routing:
    """A routing specification; `text` is its one canonical spelling.

    `alpha` belongs to zipf, `share` and `experts[0]` to hot, `experts` to empty and one, `path` and
    `trace_hash` (16 hexadecimal digits of the file's SHA-256) to trace.
    """

    text: str
    kind: str
    alpha: float = 0.0
    share: float = 0.0
    experts: tuple[int, ...] = ()
    path: str = ""
    trace_hash: str = ""

    def check(self, problem: Problem) -> None:
        """Raise `RoutingError` when an expert is not in the problem or too few are left. Reads no file."""
        beyond = [e for e in self.experts if e >= problem.experts]
        if beyond:
            raise RoutingError(
                f"The routing {self.text!r} names expert {beyond[0]}, and there are {problem.experts}.",
                f"Experts are counted from 0 to {problem.experts - 1}.",
            )
        left = problem.experts - len(self.experts)
        if self.kind == "empty" and left < problem.top_k:
            raise RoutingError(
                f"The routing {self.text!r} leaves {left} experts for top_k = {problem.top_k}.",
                "Leave at least top_k experts non-empty.",
            )

    def check_trace(self, problem: Problem) -> None:
        """Like `check`, and read a trace file to see that it fits. Raises `RoutingError`."""
        self.check(problem)
        if self.kind == "trace":
            _read_trace(self, problem)

    def draw(self, problem: Problem, seed: int) -> Any:
        """Expert ids as a numpy int32 array (ranks, tokens, top_k), distinct within a token.

        A pure function of the text, the problem's shapes and `seed`: every rank that calls it holds the same
        array. Raises `RoutingError` when the routing does not fit the problem.
        """
        self.check(problem)
        if self.kind == "trace":
            return _window(_read_trace(self, problem), problem, seed)
        return _draw(self, problem, seed)


def parse_routing(text: str) -> Routing:
    """Read a routing specification. A trace file is hashed here when the text does not carry its hash yet.

    >>> parse_routing("zipf:1.20").text
    'zipf:1.2'

    Raises `RoutingError` for an unknown kind, a wrong number, or a trace that is not there.
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "uniform" and not rest:
        return Routing("uniform", "uniform")
    if kind == "zipf" and rest:
        alpha = _real(text, rest, "ALPHA", 0.0, 16.0)
        return Routing(f"zipf:{alpha:g}", "zipf", alpha=alpha)
    if kind == "hot" and rest:
        share_text, at, expert_text = rest.partition("@")
        share = _real(text, share_text, "SHARE", 0.0, 1.0)
        expert = _expert(text, expert_text) if at else 0
        return Routing(f"hot:{share:g}@{expert}", "hot", share=share, experts=(expert,))
    if kind == "empty" and rest:
        experts = tuple(sorted({_expert(text, part) for part in rest.split(",")}))
        return Routing(f"empty:{','.join(map(str, experts))}", "empty", experts=experts)
    if kind == "one" and rest:
        expert = _expert(text, rest)
        return Routing(f"one:{expert}", "one", share=1.0, experts=(expert,))
    if kind == "trace" and rest:
        named = _HASH.fullmatch(rest)
        path = named["path"] if named else rest
        trace_hash = named["hash"] if named else _hash_of(path)
        return Routing(f"trace:{path}#{trace_hash}", "trace", path=path, trace_hash=trace_hash)
    raise RoutingError(f"The routing {text!r} is not understood.", f"Write one of: {_FORMS}.")


def gate_routings(problem: Problem) -> list[str]:
    """Routings a config must be correct under before it is timed: the problem's own, one with an empty expert,
    one with a hot expert. At least two, all distinct.
    """
    texts = [problem.routing]
    if problem.experts > problem.top_k:
        texts.append(parse_routing("empty:0").text)
    texts.append(parse_routing(f"hot:0.9@{problem.experts - 1}").text)
    if len(set(texts)) < 2:
        texts.append("uniform")
    return list(dict.fromkeys(texts))


GATE_ROUTINGS = gate_routings


def _real(text: str, part: str, name: str, low: float, high: float) -> float:
    try:
        value = float(part)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise RoutingError(
            f"In the routing {text!r}, {name} = {part!r} is not a number in {low:g}..{high:g}.",
            f"Write one of: {_FORMS}.",
        )
    return value


def _expert(text: str, part: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", part.strip()):
        raise RoutingError(
            f"In the routing {text!r}, {part!r} is not an expert's number.", f"Write one of: {_FORMS}."
        )
    return int(part)


def _hash_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise RoutingError(
            f"The routing trace {path} cannot be read: {error.strerror}.",
            "Name an .npy or .json file of expert ids.",
        ) from error


def _uniforms(count: int, *words: str | int) -> Any:
    """`count` doubles in [0, 1) from PCG64 raw output, whose stream numpy keeps stable across versions."""
    import numpy

    seed = int.from_bytes(hashlib.sha256(":".join(map(str, words)).encode()).digest()[:16], "little")
    raw = numpy.random.PCG64(seed).random_raw(count)
    return (raw >> numpy.uint64(11)) * 2.0**-53


def _draw(routing: Routing, problem: Problem, seed: int) -> Any:
    """Weighted sampling without replacement: each token takes the top_k experts that win an exponential race."""
    import numpy

    ranks, tokens, experts = problem.expert_ranks, problem.tokens, problem.experts
    drawn = numpy.empty((ranks, tokens, problem.top_k), numpy.int32)
    key = (routing.text, ranks, tokens, experts, problem.top_k, seed)
    weights = numpy.ones(experts)
    if routing.kind == "zipf":
        # Which experts are popular depends on the text alone, so that all seeds agree on it.
        order = numpy.argsort(_uniforms(experts, "popularity", routing.text, experts), kind="stable")
        weights[order] = numpy.arange(1, experts + 1, dtype=numpy.float64) ** -routing.alpha
    for rank in range(ranks):
        race = _uniforms(tokens * experts, *key, "race", rank).reshape(tokens, experts)
        if routing.kind == "zipf":
            race = -numpy.log1p(-race) / weights
        elif routing.kind in ("hot", "one"):
            hit = _uniforms(tokens, *key, "hit", rank) < routing.share
            race[:, routing.experts[0]] = numpy.where(hit, -1.0, 2.0)
        elif routing.kind == "empty":
            race[:, list(routing.experts)] = 2.0
        drawn[rank] = numpy.argsort(race, axis=1, kind="stable")[:, : problem.top_k]
    return drawn


def _read_trace(routing: Routing, problem: Problem) -> Any:
    """The trace as an int32 array (assignments, top_k), checked against the problem and its recorded hash."""
    import numpy

    if _hash_of(routing.path) != routing.trace_hash:
        raise RoutingError(
            f"The routing trace {routing.path} is not the one with hash {routing.trace_hash}.",
            f"Restore the file, or write trace:{routing.path} to take the new one as another problem.",
        )
    path = Path(routing.path).expanduser()
    try:
        ids = (
            numpy.asarray(json.loads(path.read_text()))
            if path.suffix == ".json"
            else numpy.load(path, allow_pickle=False)
        )
    except ValueError as error:
        raise RoutingError(
            f"The routing trace {routing.path} is no array of ids: {error}.",
            "Write an .npy array or a JSON list of lists of whole numbers.",
        ) from error
    wanted = problem.expert_ranks * problem.tokens
    if ids.ndim < 2 or ids.dtype.kind not in "iu" or ids.shape[-1] != problem.top_k:
        raise RoutingError(
            f"The routing trace {routing.path} holds {ids.dtype} of shape {ids.shape}, not whole numbers "
            f"(tokens, {problem.top_k}).",
            "Give one row of top_k expert ids for each token.",
        )
    ids = ids.reshape(-1, problem.top_k)
    if len(ids) < wanted:
        raise RoutingError(
            f"The routing trace {routing.path} holds {len(ids)} tokens, and the problem needs {wanted}.",
            f"Use tokens ≤ {len(ids) // problem.expert_ranks} or a longer trace.",
        )
    if ids.min() < 0 or ids.max() >= problem.experts:
        raise RoutingError(
            f"The routing trace {routing.path} names experts {ids.min()}..{ids.max()}, "
            f"and there are {problem.experts}.",
            f"Experts are counted from 0 to {problem.experts - 1}.",
        )
    ordered = numpy.sort(ids, axis=1)
    twice = numpy.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if twice.size:
        raise RoutingError(
            f"In the routing trace {routing.path}, token {twice[0]} names an expert twice.",
            "A token picks distinct experts.",
        )
    return ids.astype(numpy.int32)


def _window(ids: Any, problem: Problem, seed: int) -> Any:
    """The part of a trace that `seed` stands for: consecutive tokens, another stretch for another seed."""
    wanted = problem.expert_ranks * problem.tokens
    start = (seed * wanted) % (len(ids) - wanted + 1)
    window = ids[start : start + wanted]
    return window.reshape(problem.expert_ranks, problem.tokens, problem.top_k).copy()
