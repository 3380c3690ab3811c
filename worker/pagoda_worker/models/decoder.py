"""The decoder of a DecoderSpec: branches over a residual stream. One forward for prefill and decode."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from pagoda_worker.checkpoints.source import Source
from pagoda_worker.checkpoints.spec import DecoderSpec, LayerSpec, MoeShape, linear_layers, whole_tensors
from pagoda_worker.checkpoints.temper import temper_table
from pagoda_worker.kernels.kv_cache import KVLayer, KVShape, grouped, planes_of
from pagoda_worker.kernels.ops import AttentionShape, Cache, HeadNorm, Ops, Rotation, SlotRoom
from pagoda_worker.models.ends import content_of, filled, load_embedding, load_head
from pagoda_worker.models.latent import Latent, load_latent
from pagoda_worker.models.linear import AdapterTensors, Factors, Linear, Packer
from pagoda_worker.models.moe import Branch, load_mlp
from pagoda_worker.models.norms import Norm, Take, load_head_norm, load_norm
from pagoda_worker.models.order import qkv_order
from pagoda_worker.models.tables import rotary_tables
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.slots import TokenSlots

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """One layer: its matrices, its norms by role (see `Names`), and the place of its K and V."""

    qkv: Linear | Latent
    out: Linear
    mlp: Branch
    norms: dict[str, Norm]
    head_norm: HeadNorm | None
    head_norms: dict[int, HeadNorm]  # adapters' replacements, by slot
    attention: AttentionShape
    rope: int | None  # index of the spec's
    temper: int | None  # index of the spec's
    kv: KVLayer
    sinks: torch.Tensor | None  # see `Ops.attend`

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those around attention that adapters may add to."""
        return (*self.qkv.queries, self.out) if isinstance(self.qkv, Latent) else (self.qkv, self.out)


class Decoder:
    """A model as the runner sees it."""

    def __init__(  # noqa: PLR0913 - two are what few models have
        self,
        spec: DecoderSpec,
        ops: Ops,
        source: Source,
        dtype: torch.dtype,
        max_positions: int,
        *,
        head_size: int | None = None,
        room: SlotRoom | None = None,
    ) -> None:
        """`head_size`: number of tokens, from the first, that get logits; None: all; 0: there are hidden states, and no
        logits. Without `room` there are no adapters."""
        self.spec = spec
        self.ops = ops
        shapes = kv_shapes(spec, dtype, ops)
        if spec.causal:
            self.kv_groups, kv_layers = grouped(shapes)
        else:  # nothing is kept: each layer overwrites the last
            self.kv_groups, kv_layers = (shapes[0],), [KVLayer(0, 0)] * len(shapes)
        others = len(spec.tempers) * torch.float32.itemsize
        self._ropes = rotary_tables(spec.ropes, max_positions, ops.device, others)
        self._tempers = [temper_table(shape, max_positions, ops.device) for shape in spec.tempers]
        packer = Packer(ops, source, dtype, room)
        self._layers = [_load_layer(spec, packer, index, kv) for index, kv in enumerate(kv_layers)]
        self._final_norm = _load_final_norm(spec, source.tensor)
        self._embed = load_embedding(spec, source, dtype)
        self._positions = _load_positions(spec, source) if spec.learned_positions else None
        self._head, self._head_content = load_head(spec, packer, self._embed.table, head_size)
        self.replacing: frozenset[int] = frozenset()  # slots of adapters that replace tensors of the model

    @property
    def recordable(self) -> bool:
        """Whether `Ops.record` can record its steps: only operations, on the same rows in all layers."""
        return not any(
            layer.attention.chunked or layer.temper or (isinstance(layer.mlp, MoeShape) and layer.mlp.routing.inputs)
            for layer in self.spec.layers
        )

    def on(self, ops: Ops) -> Decoder:
        """The same weights, for recording with `ops`, which must be of the back end that packed them; no adapter
        replaces anything."""
        other = copy.copy(self)
        other.ops, other.replacing = ops, frozenset()
        return other

    def replaced(self, slots: TokenSlots | None) -> TokenSlots | None:
        """`slots`, if an adapter of one replaces a tensor of the model or adds to the embedding: such steps run
        operation by operation, each for all tokens, and again for the tokens of such a slot."""
        return None if slots is None or self.replacing.isdisjoint(slots.slots.tolist()) else slots

    def plan(self, batch: Batch, kv: Sequence[Cache]) -> list[Any]:
        """The plans that `forward` makes itself if given none: one for each group."""
        views = [_seen(batch.at(group.shape.table), group) for group in kv]
        return [_Plan(self.ops.plan(view, group), view) for view, group in zip(views, kv, strict=True)]

    def forward(self, batch: Batch, kv: Sequence[Cache], plan: list[Any] | None = None) -> torch.Tensor:
        """Write the K and V of the batch's tokens, return their final hidden states [T, H]."""
        places = [batch.at(group.shape.table) for group in kv]
        for group, part in zip(kv, places, strict=True):
            group.admit(part)
        plan = self.plan(batch, kv) if plan is None else _followed(plan, places, kv)
        rotations = [table.at(batch.positions) for table in self._ropes]
        replaced = self.replaced(batch.slots)
        stream = self._embed.run(batch.token_ids, self.ops, replaced)
        if self._positions is not None:
            stream = self.ops.add_positions(stream, self._positions, batch.positions)
        tempers = [table.index_select(0, batch.positions) for table in self._tempers]
        indices, made = [part.kv_indices for part in places], [one.made for one in plan]
        hidden = self._run(stream, _Step(indices, kv, made, rotations, tempers, batch.slots, replaced))
        for group, part in zip(kv, places, strict=True):
            group.inspect(part, hidden)
        return hidden

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, slots: TokenSlots | None = None
    ) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32, in `out` if given; `slots` are of those tokens."""
        if self._head is None:
            raise TypeError("a model without a head has no logits")
        logits = self._head.logits(hidden, self.ops, slots, self.replaced(slots))
        return logits.float() if out is None else out.copy_(logits)

    @property
    def adapted(self) -> dict[str, tuple[Linear, str]]:
        """Where adapters may add: a matrix's checkpoint name -> the linear layer it is in, and its part there."""
        names = self.spec.names
        layers = [(*layer.linears, *layer.mlp.linears) for layer in self._layers]
        found = {
            names.in_layer(index, part): (linear, part)
            for index, linears in enumerate(layers)
            for linear in linears
            for part in linear.columns
        }
        return found if self._head is None else found | {names.head: (self._head.linear, names.head)}

    def adapt(self, slot: int, tensors: AdapterTensors) -> None:
        """Fill the slot with the adapter of these `tensors`, named as in `adapted` and `whole_tensors`."""
        parts: dict[int, tuple[Linear, dict[str, Factors]]] = {}
        for name, (linear, part) in self.adapted.items():
            _, found = parts.setdefault(id(linear), (linear, {}))
            if name in tensors.factors:
                found[part] = tensors.factors[name]
        for linear, found in parts.values():
            linear.fill(slot, found, self.ops)
        self._replace_ends(slot, tensors)
        self._replace_norms(slot, {name: one.to(self.ops.device) for name, one in tensors.whole.items()})
        tables: list[Collection[int]] = [self._final_norm.instead, self._embed.instead]
        tables += [] if self._head is None else [self._head.instead]
        for layer in self._layers:
            tables += [layer.head_norms, *(norm.instead for norm in layer.norms.values())]
        self.replacing = frozenset(taken for table in tables for taken in table)

    def differing(self, tensors: AdapterTensors) -> AdapterTensors:
        """Without tables equal to the model's own: PEFT saves them with adapters that add to them."""
        names, table = self.spec.names, self._embed.table
        embed, head = f"{names.top(names.embed)}.weight", f"{names.head}.weight"
        whole = dict(tensors.whole)
        if embed in whole and torch.equal(whole[embed].to(table.device), table):
            del whole[embed]
        if head in whole and content_of(whole[head]) == self._head_content:
            del whole[head]
        return tensors._replace(whole=whole)

    def adapter_bytes(self, ranks: Mapping[str, int], whole: Iterable[str]) -> int:
        """Bytes that an adapter takes here: with these ranks, by matrix name, and these of `whole_tensors`."""
        spec, size, tensors = self.spec, self._embed.table.element_size(), whole_tensors(self.spec)
        lines = filled(ranks.get(spec.names.top(spec.names.embed), 0)) * (spec.vocab_size + spec.hidden_size)
        brought = [tensors[name] for name in whole]
        kept = sum(math.prod(shape) * (size if len(shape) > 1 else torch.float32.itemsize) for shape in brought)
        return self._added_bytes(ranks) + lines * size + kept

    def _added_bytes(self, ranks: Mapping[str, int]) -> int:
        """Of linear layers."""
        shapes = linear_layers(self.spec)
        shapes[self.spec.names.head] = self.spec.vocab_size, self.spec.hidden_size
        layers: dict[int, list[str]] = {}
        for name, (linear, _) in self.adapted.items():
            layers.setdefault(id(linear), []).append(name)
        return sum(
            self.ops.slot_bytes(
                shapes[names[0]][1], [shapes[name][0] for name in names], [ranks.get(name, 0) for name in names]
            )
            for names in layers.values()
        )

    def _replace_ends(self, slot: int, tensors: AdapterTensors) -> None:
        names = self.spec.names
        embed = names.top(names.embed)
        self._embed.fill(slot, tensors.whole.get(f"{embed}.weight"), tensors.factors.get(embed), self.ops)
        if self._head is not None:
            self._head.fill(slot, tensors.whole.get(f"{names.head}.weight"), self.ops)

    def _replace_norms(self, slot: int, whole: Mapping[str, torch.Tensor]) -> None:
        spec, names, take = self.spec, self.spec.names, whole.__getitem__
        final = f"{names.top(names.final_norm)}.weight" in whole
        _put(self._final_norm.instead, slot, _load_final_norm(spec, take) if final else None)
        for index, layer in enumerate(self._layers):
            for role, norm in layer.norms.items():
                brought = f"{names.in_layer(index, names.norms[role])}.weight" in whole
                _put(norm.instead, slot, _load_layer_norm(spec, take, index, role) if brought else None)
            brought = f"{names.in_layer(index, names.query_norm)}.weight" in whole
            own = load_head_norm(spec, spec.layers[index], take, index, self.ops.device) if brought else None
            _put(layer.head_norms, slot, own)

    def _run(self, stream: torch.Tensor, step: _Step) -> torch.Tensor:
        """Branches read the stream and are added to it; the spec decides which norms they pass on the way."""
        ops, branch = self.ops, None
        for layer in self._layers:
            x, stream = self._leave(stream, branch, layer.norms.get("attention"), step)
            branch = self._come_back(self._attend(x, layer, step), layer.norms.get("after_attention"), step)
            if self.spec.parallel:
                own = layer.norms.get("mlp")
                x = x if own is None else own.run(stream, ops, step.replaced)
                branch = ops.add(layer.mlp.run(x, ops, step.slots), branch)
            else:
                x, stream = self._leave(stream, branch, layer.norms.get("mlp"), step)
                branch = self._come_back(layer.mlp.run(x, ops, step.slots), layer.norms.get("after_mlp"), step)
        return self._leave(stream, branch, self._final_norm, step)[0]

    def _leave(
        self, stream: torch.Tensor, branch: torch.Tensor | None, norm: Norm | None, step: _Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the last branch (None before the first layer) to the stream; returns it normed, and as it is."""
        if norm is None:
            total = stream if branch is None else self.ops.add(branch, stream)
            return total, total
        if branch is None:
            return norm.run(stream, self.ops, step.replaced), stream
        return norm.add(branch, stream, self.ops, step.replaced)

    def _come_back(self, branch: torch.Tensor, norm: Norm | None, step: _Step) -> torch.Tensor:
        return branch if norm is None else norm.run(branch, self.ops, step.replaced)

    def _attend(self, x: torch.Tensor, layer: Layer, step: _Step) -> torch.Tensor:
        ops, (group, index) = self.ops, layer.kv
        kv, plan = step.kv[group], step.plan[group]
        query = self._write(x, layer, step)
        if layer.temper is not None:
            query = (query * step.tempers[layer.temper]).to(query.dtype)
        attended = ops.attend(query, kv, index, plan, layer.attention, layer.sinks)
        if isinstance(layer.qkv, Latent):
            attended = layer.qkv.values(attended, ops)
        return layer.out.linear(attended, ops, step.slots)

    def _write(self, x: torch.Tensor, layer: Layer, step: _Step) -> torch.Tensor:
        """Write keys and values into the cache; returns queries [T, Hq, D]."""
        ops, (group, index), indices = self.ops, layer.kv, step.kv_indices[layer.kv.group]
        rotation = None if layer.rope is None else step.rotations[layer.rope]
        if isinstance(layer.qkv, Latent):
            return ops.latent_write(*layer.qkv.project(x, ops, step.slots), rotation, step.kv[group], index, indices)
        qkv = layer.qkv.linear(x, ops, step.slots)
        if step.replaced is None or not layer.head_norms:
            return ops.rope_write(qkv, rotation, layer.head_norm, step.kv[group], index, indices)
        attention = layer.attention
        query = qkv.new_empty(len(qkv), attention.num_heads, attention.head_dim)
        for norm, places in step.replaced.parts(layer.head_norms, layer.head_norm):
            turned = None if rotation is None else replace(rotation, positions=rotation.positions[places])
            query[places] = ops.rope_write(qkv[places], turned, norm, step.kv[group], index, indices[places])
        return query


@dataclass(frozen=True)
class _Step:
    """Shared by all layers of a step."""

    kv_indices: Sequence[torch.Tensor]  # of each group, like `kv` and `plan`
    kv: Sequence[Cache]
    plan: list[Any]
    rotations: list[Rotation]
    tempers: list[torch.Tensor]  # [T, 1, 1] float32
    slots: TokenSlots | None
    replaced: TokenSlots | None  # see `Decoder.replaced`


def kv_shapes(spec: DecoderSpec, dtype: torch.dtype, ops: Ops) -> list[KVShape]:
    """The shape of each layer's K and V, in a cache of `ops`."""
    return [
        KVShape(
            num_layers=1,
            num_kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            dtype=dtype,
            window=layer.attention.window if layer.attention.causal else None,
            chunked=layer.attention.chunked,
            planes=planes_of(layer.latent is not None, ops.keeps_latents_once),
        )
        for layer in spec.layers
    ]


class _Plan(NamedTuple):
    """Of a group: the back end's plan for the batch as the group's attention sees it."""

    made: Any
    view: Batch


def _seen(batch: Batch, group: Cache) -> Batch:
    """The batch as seen by attention of the group's layers."""
    shape = group.shape
    return batch.in_chunks(shape.window, group.block_size) if shape.chunked and shape.window else batch


def _followed(plan: list[_Plan], places: Sequence[Batch], kv: Sequence[Cache]) -> list[_Plan]:
    """Renew a plan that was made before the device knew this step's lengths."""
    for one, part, group in zip(plan, places, kv, strict=True):
        shape = group.shape
        if shape.chunked and shape.window and one.view.block_tables is not part.block_tables:
            one.view.follow(part, shape.window, group.block_size)
    return plan


def _load_positions(spec: DecoderSpec, source: Source) -> torch.Tensor:
    """Learned positions, [P, H], from the first token's on."""
    return source.tensor(f"{spec.names.top(spec.names.positions)}.weight")[spec.position_offset :]


def _load_qkv(spec: DecoderSpec, layer: LayerSpec, packer: Packer, prefix: str) -> Linear | Latent:
    if layer.latent is not None:
        return load_latent(spec, layer, packer, prefix)
    names = spec.names
    return packer.pack(prefix, names.qkv, spec.qkv_bias, order=qkv_order(layer, names.grouped))


def _load_layer(spec: DecoderSpec, packer: Packer, index: int, kv: KVLayer) -> Layer:
    layer, names, take = spec.layers[index], spec.names, packer.source.tensor
    prefix = names.in_layer(index, "")
    norms = {role: _load_layer_norm(spec, take, index, role) for role in names.norms}
    return Layer(
        qkv=_load_qkv(spec, layer, packer, prefix),
        out=packer.pack(prefix, [names.out], spec.out_bias, segments=spec.segments),
        mlp=load_mlp(spec, layer, packer, prefix),
        norms=norms,
        head_norm=load_head_norm(spec, layer, take, index, packer.ops.device),
        head_norms={},
        attention=layer.attention,
        rope=None if layer.rope is None else spec.ropes.index(layer.rope),
        temper=None if layer.temper is None else spec.tempers.index(layer.temper),
        kv=kv,
        sinks=packer.source.exact(prefix + names.sinks) if layer.attention.sinks else None,
    )


def _load_layer_norm(spec: DecoderSpec, take: Take, index: int, role: str) -> Norm:
    name = spec.names.in_layer(index, spec.names.norms[role])
    return load_norm(spec, take, name, not role.startswith("after"))


def _load_final_norm(spec: DecoderSpec, take: Take) -> Norm:
    return load_norm(spec, take, spec.names.top(spec.names.final_norm), True, spec.logit_scale)


def _put(table: dict[int, T], slot: int, one: T | None) -> None:
    """Set what replaces something for this slot; None: nothing."""
    table.pop(slot, None)
    if one is not None:
        table[slot] = one
