"""A decoder as data: everything in which the natively supported families differ.

A config.json is read into a `DecoderSpec`, and `Decoder` is built from it; the spec implies the names and shapes of all
weights, so a checkpoint can be checked before a byte of it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.checkpoints.names import LLAMA, Names
from pagoda_worker.checkpoints.rope import RopeShape
from pagoda_worker.checkpoints.temper import Temper
from pagoda_worker.kernels.ops import AttentionShape
from pagoda_worker.kernels.routing import Routing
from pagoda_worker.kernels.segments import num_segments


@dataclass(frozen=True, kw_only=True)
class MlpShape:
    """act(gate) * up [I], or act(up) without a gate; then down. `activation`: see `Ops.gated_linear`."""

    width: int  # I
    activation: str = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Gated experts of width I each, and a shared MLP that every token passes, times its own gate, if any.

    `bias`: of the router and of the experts; `favour`: see `kernels.routing`.
    """

    routing: Routing
    width: int  # I
    activation: str = "silu"
    shared: MlpShape | None = None
    shared_gate: bool = False
    bias: bool = False
    favour: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Keys and values of all heads derive from one latent of `rank` numbers, and `turning` more, which are part of
    keys.

    A head's query has `plain` dimensions, which meet keys made from the latent, and `turning` ones; its value has
    `value`. `query_rank`: queries derive from a latent, too; None: from the stream. See `models.latent`.
    """

    rank: int
    turning: int
    plain: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ between layers of one model: how they attend, their rotary angles (if any), and their MLP.

    `unit_heads`: RMS norm of every query and key head, without weights.
    """

    attention: AttentionShape
    rope: RopeShape | None
    mlp: MlpShape | MoeShape
    latent: LatentShape | None = None
    unit_heads: bool = False
    temper: Temper | None = None

    @property
    def latents(self) -> tuple[int, ...]:
        """Their sizes."""
        shape = self.latent
        return () if shape is None else (shape.rank, *(() if shape.query_rank is None else (shape.query_rank,)))

    @property
    def attended(self) -> int:
        """Inputs of `out`."""
        heads = self.attention.num_heads
        return heads * (self.attention.head_dim if self.latent is None else self.latent.value)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """See `Names.norms` for where the norms stand.

    Attributes:
        max_positions: Tokens of a request unless configured; `reach` is the most.
        head_norms: RMS norm of every query and key head, before rotation.
        width_norms: RMS norm of all query heads together, and of all key heads.
        norm_kind: "rms", or "layer", which also subtracts the mean; `norm_bias` is added after it.
        norm_offset: Gemma stores norm weights minus one.
        parallel: The MLP reads the same input as attention, not its output.
        embed_scale: Of embeddings, rounded to the run dtype as the published models do.
        residual_scale: Of what each branch adds.
        unused_layers: Number of multi-token prediction layers that a checkpoint may have besides; not loaded.
        unused: Name prefixes of tensors that are not served.
        spellings: Alternative names in checkpoints of the family.
    """

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    layers: tuple[LayerSpec, ...]
    names: Names = LLAMA
    spellings: tuple[Names, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    width_norms: bool = False
    norm_kind: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    parallel: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # table entries before the first position
    embed_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    tied: bool = False
    unused_layers: int = 0
    unused: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def causal(self) -> bool:
        """Whether attention is causal; if not, the model reads whole prompts and does not generate."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def segments(self) -> int:
        """The number of segments of the inputs of `out` and `down`, the same in all layers; see `kernels.segments`."""
        attended = [layer.attended for layer in self.layers]
        dense = [mlp.width for layer in self.layers if (mlp := dense_mlp(layer)) is not None]
        return num_segments([*attended, *dense], [layer.attention.num_heads for layer in self.layers])

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        """The distinct rotary shapes of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def tempers(self) -> tuple[Temper, ...]:
        """The distinct ones of the layers."""
        return tuple(dict.fromkeys(layer.temper for layer in self.layers if layer.temper is not None))

    @property
    def reach(self) -> int:
        """The longest row that the rotary embeddings are made for."""
        return max(self.max_positions, *(rope.reach for rope in self.ropes), 0)


def both_ways(spec: DecoderSpec) -> DecoderSpec:
    """The same with bidirectional attention: every token attends as far forwards as backwards.

    Raises UnsupportedConfig for layers that are causal by nature.
    """
    if any(layer.latent or layer.attention.chunked or layer.attention.sinks for layer in spec.layers):
        raise UnsupportedConfig("config.json: latents, chunks and sinks need causal attention")
    layers = (replace(layer, attention=replace(layer.attention, causal=False)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def dense_mlp(layer: LayerSpec) -> MlpShape | None:
    """The MLP that every token passes, if any."""
    return layer.mlp.shared if isinstance(layer.mlp, MoeShape) else layer.mlp


# Buffers in older exports; they hold nothing that config.json does not say.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias", ".attention.masked_bias", ".attention.bias",
    ".attn.masked_bias", ".attn.bias",
)  # fmt: skip


def unused_prefixes(spec: DecoderSpec) -> tuple[str, ...]:
    """Name prefixes of further tensors that a checkpoint may have."""
    first = spec.num_layers
    return *spec.unused, *(spec.names.in_layer(index, "") for index in range(first, first + spec.unused_layers))


def as_spelled(spec: DecoderSpec, found: Collection[str]) -> DecoderSpec:
    """The spec with the names that fit a checkpoint with these tensors best, in whatever form its matrices are."""
    modules = {name.rpartition(".")[0] for name in found}

    def is_there(name: str) -> bool:
        return name in found or (name.endswith(".weight") and name.removesuffix(".weight") in modules)

    def missing(names: Names) -> int:
        return sum(not is_there(name) for name in expected_tensors(replace(spec, names=names)))

    return replace(spec, names=min((spec.names, *spec.spellings), key=missing)) if spec.spellings else spec


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint of this spec has."""
    names, hidden = spec.names, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.top(names.embed)}.weight": (spec.vocab_size, hidden)}
    shapes |= dict.fromkeys(norm_tensors(spec, names.top(names.final_norm)), (hidden,))
    if spec.learned_positions:
        shapes[f"{names.top(names.positions)}.weight"] = (spec.max_positions + spec.position_offset, hidden)
    if not spec.tied:
        shapes[f"{names.head}.weight"] = (spec.vocab_size, hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {names.in_layer(index, part): shape for part, shape in _layer_tensors(spec, layer).items()}
    return shapes


def norm_tensors(spec: DecoderSpec, norm: str) -> list[str]:
    """The names of a norm's tensors."""
    return [f"{norm}.weight", *([f"{norm}.bias"] if spec.norm_bias else [])]


def linear_layers(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of every matrix that may be quantised; a tied head is not a matrix of its own."""
    shapes = {
        spec.names.in_layer(index, part): shape
        for index, layer in enumerate(spec.layers)
        for part, shape in _layer_matrices(spec, layer).items()
    }
    return shapes if spec.tied else shapes | {spec.names.head: (spec.vocab_size, spec.hidden_size)}


def matrices_of_all(spec: DecoderSpec) -> list[str]:
    """The names of the matrices that every token passes as they are stored: without those of experts, and those to
    latents and back. Their order does not depend on the spelling."""
    names, found = spec.names, []
    for index, layer in enumerate(spec.layers):
        latent = (names.latent_down, *names.latent_up)
        parts = [*(part for part in _query_key_value(spec, layer) if part not in latent), names.out]
        if dense_mlp(layer) is not None:
            up, down = dense_names(names, layer)
            parts += [*up, down]
        found += [names.in_layer(index, part) for part in parts]
    return found if spec.tied else [*found, names.head]


def whole_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of tensors that adapters may replace: norms of the stream and of heads, the embedding, the output
    matrix, tied or not. Their order does not depend on the spelling."""
    names = spec.names
    norms = [name for _, name in sorted(names.norms.items())]
    norms += [names.query_norm, names.key_norm] if spec.head_norms or spec.width_norms else []
    modules = [names.top(names.embed), names.top(names.final_norm), names.head]
    modules += [names.in_layer(index, norm) for index in range(spec.num_layers) for norm in norms]
    shapes = expected_tensors(spec) | {f"{names.head}.weight": (spec.vocab_size, spec.hidden_size)}
    tensors = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    return {name: shapes[name] for name in tensors if name in shapes}


def _layer_matrices(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    names, hidden = spec.names, spec.hidden_size
    matrices = _query_key_value(spec, layer) | {names.out: (hidden, layer.attended)}
    if (dense := dense_mlp(layer)) is not None:
        up, down = dense_names(names, layer)
        matrices |= dict.fromkeys(up, ((2 if dense.gated else 1) * dense.width // len(up), hidden))
        matrices[down] = (hidden, dense.width)
    if isinstance(layer.mlp, MoeShape):
        matrices |= _expert_matrices(names, layer.mlp, hidden)
    return matrices


def _query_key_value(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    names, hidden, attention, latent = spec.names, spec.hidden_size, layer.attention, layer.latent
    if latent is not None:
        return _latent_matrices(names, latent, attention.num_heads, hidden)
    attended, kept = (heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads))
    outputs = dict(zip(names.qkv, (attended, kept, kept), strict=True)) if len(names.qkv) == 3 else {}
    outputs = outputs or {names.qkv[0]: attended + 2 * kept}
    return {part: (count, hidden) for part, count in outputs.items()}


def _latent_matrices(names: Names, latent: LatentShape, heads: int, hidden: int) -> dict[str, tuple[int, int]]:
    queries, rank = heads * (latent.plain + latent.turning), latent.query_rank
    matrices = {names.qkv[0]: (queries, hidden)}
    if rank is not None:
        matrices = {names.query_down: (rank, hidden), names.query_up: (queries, rank)}
    both = [(heads * (latent.plain + latent.value), latent.rank)]
    apart = [(heads * latent.rank, latent.plain), (heads * latent.value, latent.rank)]
    up = dict(zip(names.latent_up, both if len(names.latent_up) == 1 else apart, strict=True))
    return matrices | {names.latent_down: (latent.rank + latent.turning, hidden)} | up


def dense_names(names: Names, layer: LayerSpec) -> tuple[tuple[str, ...], str]:
    """The names of gate and up, and of down, of `dense_mlp`."""
    moe = isinstance(layer.mlp, MoeShape)
    return (names.shared_up, names.shared_down) if moe else (names.up, names.down)


def _expert_matrices(names: Names, moe: MoeShape, hidden: int) -> dict[str, tuple[int, int]]:
    """Of each expert, where each has matrices of its own."""
    shapes = dict.fromkeys(names.expert_up, (2 * moe.width // len(names.expert_up), hidden))
    shapes[names.expert_down] = (hidden, moe.width)
    numbers = range(moe.routing.experts)
    return {part.format(i): shape for part, shape in shapes.items() if "{}" in part for i in numbers}


def _expert_tensors(names: Names, moe: MoeShape, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors besides matrices that may be quantised."""
    count = moe.routing.experts
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (count, hidden)}
    if moe.shared_gate:
        shapes[f"{names.shared_gate}.weight"] = (1, hidden)
    if moe.favour:
        shapes[names.favour] = (count,)
    stacks = {} if "{}" in names.expert_down else _stacks(names, moe, hidden)
    if moe.bias:
        shapes[f"{names.router}.bias"] = (count,)
        shapes |= {f"{stack}_bias": (count, shape[0]) for stack, shape in stacks.items()}
        shapes |= {f"{one}.bias": shape[:1] for one, shape in _expert_matrices(names, moe, hidden).items()}
    for stack, shape in stacks.items():
        shapes[stack] = (count, *(shape[::-1] if names.expert_inputs_first else shape))
    return shapes


def _stacks(names: Names, moe: MoeShape, hidden: int) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of one expert in a tensor that holds those of all."""
    return {names.expert_up[0]: (2 * moe.width, hidden), names.expert_down: (hidden, moe.width)}


def expert_stacks(spec: DecoderSpec) -> dict[str, tuple[int, int, int]]:
    """Name -> (experts, outputs, inputs) of every tensor that holds the matrices of all experts of a layer."""
    if "{}" in spec.names.expert_down:
        return {}
    return {
        spec.names.in_layer(index, name): (layer.mlp.routing.experts, *shape)
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, MoeShape)
        for name, shape in _stacks(spec.names, layer.mlp, spec.hidden_size).items()
    }


def _layer_tensors(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    names, hidden, matrices = spec.names, spec.hidden_size, _layer_matrices(spec, layer)
    biased = (names.qkv if spec.qkv_bias else ()) + ((names.out,) if spec.out_bias else ())
    if (dense := dense_mlp(layer)) is not None and dense.bias:
        up, down = dense_names(names, layer)
        biased += (*up, down)
    shapes: dict[str, tuple[int, ...]] = {
        f"{part}.weight": shape[::-1] if names.transposed else shape for part, shape in matrices.items()
    }
    shapes |= {f"{part}.bias": (matrices[part][0],) for part in biased}
    for norm in names.norms.values():
        shapes |= dict.fromkeys(norm_tensors(spec, norm), (hidden,))
    if isinstance(layer.mlp, MoeShape):
        shapes |= _expert_tensors(names, layer.mlp, hidden)
    heads = layer.attention.num_heads, layer.attention.num_kv_heads
    if (latent := layer.latent) is not None:
        shapes[f"{names.latent_norm}.weight"] = (latent.rank,)
        if latent.query_rank is not None:
            shapes[f"{names.query_latent_norm}.weight"] = (latent.query_rank,)
    if layer.attention.sinks:
        shapes[names.sinks] = heads[:1]
    if spec.head_norms or spec.width_norms:
        counts = heads if spec.width_norms else (1, 1)
        for norm, count in zip((names.query_norm, names.key_norm), counts, strict=True):
            shapes[f"{norm}.weight"] = (count * layer.attention.head_dim,)
    return shapes
