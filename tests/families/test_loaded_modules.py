"""Which artifacts a rank with a GPU keeps loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("torch")

from tktune.families.cuda.module import Modules


class Loaded:
    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self.name)


def test_the_modules_that_were_used_last_stay_loaded():
    closed: list[str] = []
    loads: list[str] = []
    modules = Modules(most=3)  # type: ignore[var-annotated]

    def get(name: str) -> Loaded:
        def load() -> Loaded:
            loads.append(name)
            return Loaded(name, closed)

        found = modules.get(name, load)  # type: ignore[arg-type, return-value]
        assert found.name == name
        return found

    first = get("a")
    for name in "bca":
        get(name)
    assert get("a") is first and loads == ["a", "b", "c"] and not closed
    get("d")
    assert closed == ["b"]
    get("b")
    assert closed == ["b", "c"] and loads == ["a", "b", "c", "d", "b"]
    modules.close()
    assert sorted(closed) == ["a", "b", "b", "c", "d"]
    modules.close()
    assert len(closed) == 5


def test_an_artifact_that_does_not_load_leaves_nothing_behind():
    modules = Modules(most=1)  # type: ignore[var-annotated]

    def load() -> Loaded:
        raise OSError("not a cubin")

    with pytest.raises(OSError, match="not a cubin"):
        modules.get("a", load)  # type: ignore[arg-type, return-value]
    kept: list[str] = []
    assert modules.get("a", lambda: Loaded("a", kept)).name == "a"  # type: ignore[arg-type, return-value, attr-defined]
