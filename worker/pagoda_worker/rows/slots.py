"""An adapter in use has a slot; rows and their tokens carry the slot of their adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
NO_ADAPTER = -1
"""In place of a slot."""


@dataclass(frozen=True)
class TokenSlots:
    """The slot of each token of a step, or NO_ADAPTER. `sent` is the value of `there` if it was uploaded with other
    inputs; in a recorded step, it alone says which tokens have an adapter."""

    slots: NDArray[np.int32]  # [T]
    device: torch.device
    sent: Tensor | None = None

    @cached_property
    def tensor(self) -> Tensor:
        """[T] int32, on the host."""
        return torch.from_numpy(self.slots)

    @cached_property
    def there(self) -> Tensor:
        """[T] int64, on the device."""
        return self.tensor.long().to(self.device) if self.sent is None else self.sent

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """Each slot in use, with its tokens, on the device."""
        used = (slot for slot in np.unique(self.slots).tolist() if slot != NO_ADAPTER)
        return [(slot, torch.from_numpy(np.flatnonzero(self.slots == slot)).to(self.device)) for slot in used]

    def parts(self, others: Mapping[int, T], own: T) -> list[tuple[T, Tensor]]:
        """The tokens of each slot in `others`, with that slot's entry, and the remaining tokens with `own`."""
        shared = [(others[slot], places) for slot, places in self.groups if slot in others]
        left = torch.from_numpy(np.flatnonzero(~np.isin(self.slots, list(others)))).to(self.device)
        return [(own, left), *shared] if len(left) else shared

    def at(self, places: Tensor) -> TokenSlots:
        """The slots of some of the tokens."""
        return TokenSlots(self.slots[places.cpu().numpy()], self.device)


def slots_of(slot: int, count: int, device: torch.device) -> TokenSlots | None:
    """Slots for `count` tokens of one row."""
    return None if slot == NO_ADAPTER else TokenSlots(np.full(count, slot, np.int32), device)
