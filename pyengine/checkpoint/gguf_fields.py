"""The metadata of a GGUF file by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyengine.checkpoint.errors import ModelError


class Fields:
    """Values are read when they are asked for: vocabularies are large."""

    def __init__(self, reader: Any, path: Path) -> None:
        """reader: a gguf.GGUFReader."""
        self.path = path
        self._contents = {name: field.contents for name, field in reader.fields.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def get(self, name: str, otherwise: Any = None) -> Any:
        return self._contents[name]() if name in self._contents else otherwise

    def __getitem__(self, name: str) -> Any:
        """Raises ModelError where it is missing."""
        if name not in self._contents:
            raise ModelError(f"{self.path}: the GGUF field {name!r} is missing; convert the model again")
        return self._contents[name]()
