"""What all schedule tables are: frozen dataclasses of int32 arrays, numpy or torch, beside plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class TableArrays:
    """Arrays stand in fields of their own, or in a tuple of them."""

    def arrays(self) -> dict[str, Any]:
        """Every array by name; those of a tuple as name[0], name[1], … behind the others."""
        singles, members = {}, {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                members.update({f"{field.name}[{number}]": array for number, array in enumerate(value)})
            elif not isinstance(value, int):
                singles[field.name] = value
        return {**singles, **members}

    def numpy(self) -> Self:
        """The same tables with numpy arrays (self when they are numpy already)."""
        if not any(hasattr(array, "cpu") for array in self.arrays().values()):
            return self
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                changes[field.name] = tuple(array.cpu().numpy() for array in value)
            elif not isinstance(value, int):
                changes[field.name] = value.cpu().numpy()
        return dataclasses.replace(self, **changes)
