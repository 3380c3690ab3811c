"""A sum over fixed segments, added in a fixed binary tree, has the same bits on one device and across several.

Sharding a model splits some layers (`OUT` and `DOWN`) along their inputs. These layers sum their inputs in segments:

    ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))        in float32

Each segment is summed like a layer with one segment. Every shard holds the same number of adjacent segments, so its sum
is a node of this tree, and the sums of any number of shards that divides the segments add up to the bits of the whole
layer. A group of inputs that is rounded to 8 bits together never crosses a segment boundary, so no shard needs another
shard's magnitudes. The bias is added after the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagoda_worker.kernels.quantized import QuantizedWeight, Weight, by_groups

MOST = 8  # segments of a layer, a power of two
WIDTH = 64  # a segment's inputs are a multiple of this, so that it has whole groups of our formats
LEAST = 512  # inputs of a segment; shorter ones are slow at int8, where each group is scaled and added separately


def num_segments(inputs: Sequence[int], heads: Sequence[int]) -> int:
    """The most segments into which all layers with these inputs, or with inputs of so many whole heads, can be cut."""
    segments = math.gcd(MOST * WIDTH, *inputs, *(WIDTH * count for count in heads)) // WIDTH or 1
    while segments > 1 and min(inputs) < segments * LEAST:
        segments //= 2
    return segments


def segmented(weight: Weight, segments: int) -> tuple[Weight, int]:
    """The weight and its number of segments: `segments`, or fewer if boundaries would fall inside groups.

    A group that spans several segments becomes one group per segment, with the same scale and zero or minimum.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight, segments
    inputs, group = weight.shape[1], weight.group
    while group % (inputs // segments) and inputs // segments % group:
        segments //= 2
    times = max(1, group * segments // inputs)
    return by_groups(weight, lambda values: values.repeat_interleave(times, 1)), segments


def tree_sum(sums: torch.Tensor) -> torch.Tensor:
    """sums [S, ..] of S segments or shards in order, S a power of two -> [..]"""
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]
