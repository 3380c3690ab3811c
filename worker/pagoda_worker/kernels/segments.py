"""A sum in fixed segments, added in a fixed binary tree, is the same bits from one device or from several.

A layer that is cut along its inputs where a model is cut into shards (`OUT` and `DOWN`) adds them in segments:

    ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))        in float32

Each is summed up as a layer of one segment would be. A shard has neighbouring segments, as many as every other, so its
sum is a node of this tree, and shards of any number that divides the segments add up to the bits of the whole layer. A
group of inputs that are rounded to 8 bits together ends with its segment at the latest: a shard needs no magnitude of
another's. The bias comes after the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pagoda_worker.kernels.quantized import QuantizedWeight, Weight

MOST = 8  # segments of a layer, a power of two
WIDTH = 64  # inputs of a segment are a multiple of so many: the groups of our formats are whole ones then
LEAST = 512  # inputs of a segment: shorter ones cost time at int8, whose every group is scaled and added on its own


def num_segments(inputs: Sequence[int], heads: Sequence[int]) -> int:
    """The most segments that layers with these inputs all fall into; those of so many heads, into whole ones."""
    segments = math.gcd(MOST * WIDTH, *inputs, *(WIDTH * count for count in heads)) // WIDTH or 1
    while segments > 1 and min(inputs) < segments * LEAST:
        segments //= 2
    return segments


def segmented(weight: Weight, segments: int) -> tuple[Weight, int]:
    """The weight, and the number of segments its inputs fall into: `segments`, fewer where its groups would be cut.

    A group of several segments becomes a group for each, with the same scale and zero.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight, segments
    inputs, group = weight.shape[1], weight.group
    while group % (inputs // segments) and inputs // segments % group:
        segments //= 2
    times = max(1, group * segments // inputs)
    zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(times, 1)
    return replace(weight, scales=weight.scales.repeat_interleave(times, 1), zeros=zeros), segments


def tree_sum(sums: torch.Tensor) -> torch.Tensor:
    """sums [S, ..] of S segments or shards, a power of two, in order -> [..]"""
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]
