"""Names of adapters: a name is resolved once, when its adapter is loaded, and every request carries the digest.

So when a name is loaded again from other files, it means these from the next request on, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagoda_gateway.catalogue import Catalogue
from pagoda_gateway.clients import Caller
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.adapters.files import CONFIG, AdapterError, directory_of, identify, inside
from pagoda_proto.adapters.identity import NAME, Adapter, read_lora_modules
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Generate, RequestRecord

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Names of directories that `lora_resolver` looks up."""


def named_adapters(config: GatewayConfig) -> dict[str, tuple[Adapter, str]]:
    """Read all adapters of `lora_modules`: by name, each with the parent given for it.

    Raises:
        ValueError: one cannot be read, or adapters are to be loaded from a directory that is not here.
    """
    if config.lora_loading or config.lora_resolver:
        directory_of(config.lora_dir)
    found: dict[str, tuple[Adapter, str]] = {}
    for name, (path, parent) in read_lora_modules(config.lora_modules).items():
        try:
            found[name] = identify(Path(path).absolute(), config.max_lora_bytes), parent
        except AdapterError as error:
            raise ValueError(f"lora_modules: {name!a} at {path}: {error}") from error
    return found


class AdapterNames:
    """The adapters in a catalogue, which nothing else changes; loads them one at a time."""

    def __init__(self, config: GatewayConfig, catalogue: Catalogue) -> None:
        self._config = config
        self._catalogue = catalogue
        self._loading = asyncio.Lock()

    def name_all(self, adapters: Mapping[str, tuple[Adapter, str]]) -> None:
        """Raises ValueError if one of the names is the model's own."""
        for name, (adapter, parent) in adapters.items():
            if self._catalogue.is_model(name):
                raise ValueError(f"lora_modules: {name!a} is the name of the model itself")
            self._name(name, adapter, parent)

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Give a name to the adapter at `path` in `lora_dir`, once a worker has computed a token with it.

        Raises:
            PagodaError: INVALID_ARGUMENT for an invalid name or files, or the worker's error.
        """
        if not NAME.fullmatch(name) or not name.isprintable():
            rule = "a name has 1 to 256 printable characters, no space, comma, = or \\"
            raise _refused("lora_name", f"{rule}, got {name[:64]!a}")
        async with self._loading:
            self._check_name(name, in_place=in_place)
            await self._load(name, Path(self._config.lora_dir, path))

    def unload(self, name: str) -> None:
        """Running requests continue. Raises PagodaError MODEL_NOT_FOUND."""
        if name not in self._names():
            raise PagodaError(ErrorCode.MODEL_NOT_FOUND, f"there is no adapter {name[:64]!a} here", "lora_name")
        self._catalogue.remove(name)

    async def resolve(self, name: str | None, caller: Caller) -> None:
        """Load the adapter in the directory of this name, if there is one and the caller may use that name.

        Raises:
            PagodaError: the adapter cannot be used.
        """
        known = name is None or not self._config.lora_resolver or name in {model.name for model in self._catalogue}
        if name is None or known or not caller.grant.allows_model(name):
            return
        if not await asyncio.to_thread(self.is_found, name):  # so other names do not wait for a load
            return
        async with self._loading:
            if name not in self._names():
                self._check_name(name, in_place=False)
                await self._load(name, Path(self._config.lora_dir, name))

    def is_found(self, name: str) -> bool:
        """Whether there is a directory of this name that `resolve` would load. Looks at the disk."""
        plain = self._config.lora_resolver and PLAIN_NAME.fullmatch(name)
        return bool(plain) and os.path.isfile(Path(self._config.lora_dir, name, CONFIG))

    async def _load(self, name: str, path: Path) -> None:
        allowed, most = [Path(self._config.lora_dir)], self._config.max_lora_bytes
        try:
            adapter = await asyncio.to_thread(lambda: identify(inside(path, allowed), most))
        except AdapterError as error:
            raise _refused("lora_path", str(error)) from error
        await self._try(adapter)
        self._name(name, adapter)

    async def _try(self, adapter: Adapter) -> None:
        """Have a token computed, on the path of ordinary requests."""
        record = RequestRecord(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=[0],
            task=Generate(params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), seed=0),
            cache_salt="adapter",
            adapter=adapter,
        )
        generation = await self._catalogue.model.engine.submit(record, counted=False)
        try:
            while deltas := await generation.next():
                last = deltas[-1]
                if last.error_code is ErrorCode.NUMERICAL_ERROR:
                    raise _refused("lora_path", "what the model computes with it is not finite")
                if last.error_code is not None:
                    raise PagodaError(last.error_code, last.error_message, "lora_path")
        finally:
            await generation.aclose()

    def _check_name(self, name: str, *, in_place: bool) -> None:
        names = self._names()
        if self._catalogue.is_model(name):
            raise _refused("lora_name", f"{name[:64]!a} is the model itself")
        if name in names and not in_place:
            raise _refused("lora_name", f"{name[:64]!a} is loaded already; load_inplace true replaces it")
        if name not in names and len(names) >= self._config.max_lora_names:
            raise _refused("lora_name", f"{len(names)} adapters are loaded, as many as max_lora_names allows")

    def _names(self) -> set[str]:
        return {model.name for model in self._catalogue if model.adapter is not None}

    def _name(self, name: str, adapter: Adapter, parent: str = "") -> None:
        base = self._catalogue.model
        parent = parent or base.name
        self._catalogue.put(replace(base, name=name, adapter=adapter, parent=parent, created=int(time.time())))


def _refused(param: str, message: str) -> InvalidParams:
    return InvalidParams([Problem(param, message)])
