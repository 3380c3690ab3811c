"""Names of adapters: what one means is found out once, when it is loaded, and every request takes the digest along.

So a name that is loaded again, from other files, means them from the next request on, and nothing else changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagoda_gateway.catalogue import Catalogue
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.adapter_files import AdapterError, identify
from pagoda_proto.adapters import Adapter, named_paths


def named_adapters(config: GatewayConfig) -> dict[str, Adapter]:
    """What `lora_modules` names, all of it read. Raises ValueError."""
    found: dict[str, Adapter] = {}
    for name, path in named_paths(config.lora_modules).items():
        try:
            found[name] = identify(Path(path).absolute(), config.max_lora_bytes)
        except AdapterError as error:
            raise ValueError(f"lora_modules: {name!a} at {path}: {error}") from error
    return found


class AdapterNames:
    """The adapters in a catalogue, which only this changes."""

    def __init__(self, config: GatewayConfig, catalogue: Catalogue) -> None:
        self._config = config
        self._catalogue = catalogue

    def name_all(self, adapters: Mapping[str, Adapter]) -> None:
        """Raises ValueError when the model itself has one of the names."""
        for name, adapter in adapters.items():
            if name == self._catalogue.model.name:
                raise ValueError(f"lora_modules: {name!a} is the name of the model itself")
            self._name(name, adapter)

    def _name(self, name: str, adapter: Adapter) -> None:
        base = self._catalogue.model
        self._catalogue.put(replace(base, name=name, adapter=adapter, parent=base.name, created=int(time.time())))
