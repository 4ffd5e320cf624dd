"""The forms of a space: the few configs that together show every way in which its kernels can work."""

from __future__ import annotations

import itertools

from tktune.core.config import Config
from tktune.core.space import Space


def forms(space: Space) -> list[Config]:
    """Feasible configs in which any two values of different form parameters occur together, if they can at all.

    Form parameters are those whose values are words (which main loop, how tasks are drawn, in which order or way rows
    come), and clusters, whose blocks wait for each other. A new one, or a new word, joins by itself. Everything else
    is as near to the default as it can be.
    """
    names = [p.name for p in space.parameters if isinstance(p.values[0], str) or p.name == "CLUSTER"]
    default = space.default_config()
    nearest: dict[tuple[int | str, ...], Config] = {}
    for config in space.feasible:
        words = tuple(config[name] for name in names)
        known = nearest.get(words)
        if known is None or _rank(space, config, default) < _rank(space, known, default):
            nearest[words] = config
    pairs = {words: set(itertools.combinations(enumerate(words), 2)) for words in nearest}
    left = set().union(*pairs.values())
    chosen: list[Config] = []
    while left:
        # Of those that show most new pairs, the one that is most like the default.
        words = min(nearest, key=lambda w: (-len(pairs[w] & left), *_rank(space, nearest[w], default)))
        left -= pairs[words]
        chosen.append(nearest[words])
    return chosen


def form_name(space: Space, config: Config) -> str:
    """What a form is called in a test's name: the words that are not the default's."""
    default = space.default_config()
    words = [str(v) for name, v in config.items() if isinstance(v, str) and v != default[name]]
    if config.get("CLUSTER", 1) != 1:
        words.append(f"cluster{config['CLUSTER']}")
    return "+".join(words) or "default"


def _rank(space: Space, config: Config, default: Config) -> tuple[int, int, str]:
    return (*space.distance(config, default), config.digest)
