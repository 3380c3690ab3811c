"""Request bodies for loading and unloading adapters, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagoda_gateway.api.body import Body


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, description="below the option lora_dir")]
    load_inplace: Annotated[
        bool, Field(description="also if the name is loaded; requests that have begun keep theirs")
    ] = False


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
