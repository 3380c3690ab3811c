"""An adapter in use has a slot; a row has that of its adapter, and so has each of its tokens."""

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
    """The slot of each token of a step, or NO_ADAPTER. `sent` is `there`, if it was sent with other things; of what is
    recorded it alone says who has one."""

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
        """Each slot, and which tokens have it, on the device."""
        used = (slot for slot in np.unique(self.slots).tolist() if slot != NO_ADAPTER)
        return [(slot, torch.from_numpy(np.flatnonzero(self.slots == slot)).to(self.device)) for slot in used]

    def parts(self, others: Mapping[int, T], own: T) -> list[tuple[T, Tensor]]:
        """Which tokens go to what `others` have for their slots, and which go to `own`."""
        shared = [(others[slot], places) for slot, places in self.groups if slot in others]
        left = torch.from_numpy(np.flatnonzero(~np.isin(self.slots, list(others)))).to(self.device)
        return [(own, left), *shared] if len(left) else shared

    def at(self, places: Tensor) -> TokenSlots:
        """Those of some of the tokens."""
        return TokenSlots(self.slots[places.cpu().numpy()], self.device)


def slots_of(slot: int, count: int, device: torch.device) -> TokenSlots | None:
    """Of so many tokens of one row."""
    return None if slot == NO_ADAPTER else TokenSlots(np.full(count, slot, np.int32), device)
