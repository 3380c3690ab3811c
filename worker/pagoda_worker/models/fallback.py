"""Any other decoder-only model, run by transformers' own modelling code on our paged cache.

transformers lets a program register an attention function by name. Ours writes K and V into the paged cache and attends
from it, so the model sees packed tokens as one batch of size 1 with `position_ids`, and keeps no cache of its own. Its
linear layers are replaced by packed ones. Everything else is the model's code.

A model is accepted only if this runs it faithfully, which is checked by running it: every layer must call the attention
function exactly once, with no mask of its own, and the logits of a short prompt must agree with those of the unmodified
model. They are compared in float32, whatever dtype the weights have: rounding to 16 bits moves logits as far as a wrong
mask does, and may route tokens to other experts. Each packed layer is compared with the layer it replaces. The run also
shows whether splitting a prompt changes bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from pagoda_worker.checkpoints.checkpoint import Checkpoint
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.kv_cache import KVLayer, KVShape, grouped
from pagoda_worker.kernels.ops import AttentionShape, Cache, Needs, Ops
from pagoda_worker.models.widened import Widened
from pagoda_worker.rows.batch import Batch, batch_of_spans
from pagoda_worker.rows.slots import TokenSlots

ATTENTION = "pagoda_paged"
PROBE_TOKENS = 12
CUT = [7, 4, 1]
LEAST_TIMED_STEPS, MOST_TIMED_STEPS, TIMED_S = 3, 50, 1.0
AGREEMENT = 1e-3  # of the largest logit, in float32
# For a layer's output, relative to the sum of the magnitudes it adds up: the rounding of its result and some more.
PACKED_AGREEMENT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-16}
# Their frequencies depend on the longest row of a batch: a request's tokens would depend on its neighbours.
MUTABLE_ROPES = ("dynamic", "longrope")
KINDS = {"full_attention", "sliding_attention"}  # of layers
HARMLESS_ARGUMENTS = {
    "dropout", "position_ids", "use_cache", "is_causal", "position_embeddings", "past_key_values", "past_key_value",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "head_mask", "deterministic",
    "output_router_logits", "layer_head_mask",
}  # fmt: skip


@dataclass
class Context:
    """What the attention function needs besides its arguments; set during one forward pass."""

    ops: Ops
    batches: Sequence[Batch] = ()  # as the layers of each cache see it
    kv: Sequence[Cache] = ()
    plans: Sequence[Any] = ()  # one per cache
    layers: Sequence[KVLayer] = ()  # which cache and place each layer has
    calls: list[tuple[int, KVShape]] | None = None  # while probing: which layers attended, and what each keeps


class TransformersModel:
    """A model as the runner sees it. Its base computes hidden states; the causal model does the rest."""

    def __init__(self, path: Path, ops: Ops, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedConfig, naming the reason, if the model cannot be run faithfully."""
        config = _read_config(path)
        self.ops = ops
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self._causal = _load(path, config, dtype, ops.device)
        self._context = Context(ops)
        if checkpoint.progress is not None:
            checkpoint.progress(checkpoint.num_bytes, checkpoint.num_bytes)
        try:
            with torch.inference_mode():
                self.kv_groups, self.batch_invariant = self._take_over(config, dtype)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            reason = f"{config.architectures}: its code does not run on a paged cache ({type(error).__name__}: {error})"
            raise UnsupportedConfig(reason) from error
        with torch.inference_mode():
            self.step_seconds = self._measured()
        self.implementation = f"transformers {transformers.__version__}"

    def forward(self, batch: Batch, kv: Sequence[Cache]) -> torch.Tensor:
        """Write the K and V of the batch's tokens, return their final hidden states [T, H]."""
        context = self._context
        parts = [batch.at(group.shape.table) for group in kv]
        for group, part in zip(kv, parts, strict=True):
            group.admit(part)
        context.batches, context.kv = parts, kv
        context.plans = [context.ops.plan(part, group) for group, part in zip(kv, parts, strict=True)]
        try:
            output = self._base(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, return_dict=True
            )
        finally:
            context.batches, context.kv, context.plans = (), (), ()
        hidden: torch.Tensor = output.last_hidden_state[0]
        for group, part in zip(kv, parts, strict=True):
            group.inspect(part, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, *, slots: TokenSlots | None = None) -> torch.Tensor:
        """hidden [R, H] -> [R, V] float32, by the model's own code after its last layer; `slots` are not supported."""
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._causal(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64)).logits[0]
        return logits.float()

    def _take_over(self, config: Any, dtype: torch.dtype) -> tuple[tuple[KVShape, ...], bool]:
        """Replace the model's attention and linear layers by ours, and compare with what it computed before.

        Returns the caches it needs, and whether splitting a prompt leaves its bits unchanged.
        """
        ids = _probe_ids(self.vocab_size, self.ops.device)
        with Widened():
            expected = self._causal(input_ids=ids[None], use_cache=False).logits[0].float()
        self._attach()
        groups = self._probe_groups(config, ids, dtype)
        with Widened():
            self._context.ops, _ = load_ops(self.ops.device, "reference", Needs(dtype=torch.float32))
            found = self._probe([replace(group, dtype=torch.float32) for group in groups], ids, CUT)
        _check_agrees(config, found, expected)
        self._context.ops = self.ops
        _pack_linears(self._causal, self.ops)
        _pack_linears(self._base, self.ops)
        whole, cut = self._probe(groups, ids, [PROBE_TOKENS]), self._probe(groups, ids, CUT)
        if dtype == torch.float32:
            _check_agrees(config, cut, expected)
        return groups, torch.equal(whole, cut)

    def _attach(self) -> None:
        """Make our function the model's attention, and split the model into its base and its head."""
        AttentionInterface.register(ATTENTION, _attend)
        self._causal.set_attn_implementation(ATTENTION)
        for module in self._causal.modules():
            if hasattr(module, "layer_idx"):
                module.pagoda_context = self._context
        prefix = self._causal.base_model_prefix
        self._base, self._given = getattr(self._causal, prefix), _Given()
        setattr(self._causal, prefix, self._given)

    def _probe(self, groups: Sequence[KVShape], ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        """Logits after each of `ids`, computed in chunks."""
        kv = [self._context.ops.new_kv_cache(group, 1, 16) for group in groups]
        logits, start = [], 0
        for chunk in torch.split(ids, chunks):
            logits.append(self.logits(self.forward(_batch(chunk, start), kv)))
            start += len(chunk)
        return torch.cat(logits)

    def _measured(self) -> float:
        """Seconds of a step of one token, the least of a few, as other workers may be loading meanwhile."""
        kv = [self._context.ops.new_kv_cache(group, 1, 16) for group in self.kv_groups]
        batch = _batch(torch.zeros(1, dtype=torch.int64, device=self.ops.device), 0)
        times: list[float] = []
        while len(times) < LEAST_TIMED_STEPS or (len(times) < MOST_TIMED_STEPS and sum(times) < TIMED_S):
            started = perf_counter()
            int(self.logits(self.forward(batch, kv)).argmax())  # waits for the device
            times.append(perf_counter() - started)
        return min(times)

    def _probe_groups(self, config: Any, ids: torch.Tensor, dtype: torch.dtype) -> tuple[KVShape, ...]:
        """The groups of layers; also tells the context which layer is where."""
        calls: list[tuple[int, KVShape]] = []
        self._context.calls = calls
        try:
            batch = _batch(ids[:1], 0)
            self._base(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        finally:
            self._context.calls = None
        layers = int(config.num_hidden_layers)
        if sorted(layer for layer, _ in calls) != list(range(layers)):
            raise UnsupportedConfig(
                f"{config.architectures}: {len(calls)} of {layers} layers use plain attention; it cannot be served"
            )
        kept = dict(calls)
        _check_windows(config, kept)
        groups, self._context.layers = grouped([replace(kept[layer], dtype=dtype) for layer in range(layers)])
        return groups


def _check_agrees(config: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference < AGREEMENT:
        raise UnsupportedConfig(
            f"{config.architectures}: logits on the paged cache differ from transformers' own by {difference:.2g}"
        )


class _Given(nn.Module):
    """Takes the place of the base model and returns hidden states computed earlier."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """Some causal models call their base's inner decoder."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(last_hidden_state=self.hidden)


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers is not typed here
    """A base model's output that has hidden states and none of the optional parts that causal models look for."""

    cross_attentions = shared_kv_states = None


class _PackedLinear(nn.Module):
    """A linear layer of the model, computed by our operations."""

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._ops = ops
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        self._packed = ops.pack_linear(weight, bias)
        self._check(weight, bias)

    def _check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raises RuntimeError unless it computes the same as the layer it replaces."""
        x = torch.linspace(-1, 1, 2 * self.in_features, device=weight.device).view(2, -1).to(weight.dtype)
        share = PACKED_AGREEMENT[weight.dtype]
        with Widened():
            expected = F.linear(x, weight, bias)
            bound = share * F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
        if not bool(((self(x).float() - expected).abs() <= bound).all()):
            raise RuntimeError(
                f"a packed layer of {self.out_features} x {self.in_features} computes a different result"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        if not len(flat):
            return x.new_empty((*x.shape[:-1], self.out_features))
        return self._ops.linear(flat, self._packed).view(*x.shape[:-1], self.out_features)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    window, softcap, sinks = (kwargs.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    _check_call(module, key, value, attention_mask, kwargs)
    context: Context = module.pagoda_context  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if context.calls is not None:
        kept = KVShape(num_layers=1, num_kv_heads=key.shape[1], head_dim=key.shape[3], dtype=key.dtype, window=window)
        context.calls.append((layer, kept))
        return query.transpose(1, 2), None
    if not context.batches:
        raise RuntimeError("attention outside of a forward pass")
    group, index = context.layers[layer]
    kv, plan = context.kv[group], context.plans[group]
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    context.ops.write_kv(k, v, kv, index, context.batches[group].kv_indices)
    shape = AttentionShape(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=q.shape[2] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
    )
    out = context.ops.attend(q, kv, index, plan, shape, sinks)
    return out.view(1, *q.shape), None


def _check_call(
    module: nn.Module, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, others: dict[str, Any]
) -> None:
    """Reject requests for what our attention does not support."""
    unknown = sorted(
        name for name, argument in others.items() if argument is not None and name not in HARMLESS_ARGUMENTS
    )
    if mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("non-causal attention")
    if key.shape != value.shape:
        unknown.append("values whose shape differs from keys")
    if unknown:
        raise UnsupportedConfig(f"{type(module).__name__} needs {', '.join(unknown)}, which is not supported")


def _check_windows(config: Any, kept: Mapping[int, KVShape]) -> None:
    """A layer listed as sliding must pass its window, or it would attend to everything: masks are not used."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds is None:
        if window and all(one.window is None for one in kept.values()):
            raise UnsupportedConfig(
                f"{config.architectures}: 'sliding_window'={window}, but no layer is marked as sliding"
            )
        return
    silent = [i for i, one in kept.items() if kinds[i] == "sliding_attention" and one.window is None]
    if silent:
        raise UnsupportedConfig(f"{config.architectures}: layers {silent} use a sliding mask of their own")


def _read_config(path: Path) -> Any:
    """Raises UnsupportedConfig for models that transformers does not know, or that cannot be served faithfully."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedConfig(f"transformers {transformers.__version__} does not know this model: {error}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedConfig(f"config.json: {config.model_type!r} is not a decoder-only language model")
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {ropes.get("rope_type"), *(part.get("rope_type") for part in ropes.values() if isinstance(part, dict))}
    if bad := sorted(kind for kind in kinds if kind in MUTABLE_ROPES):
        raise UnsupportedConfig(f"config.json: rope type {bad[0]!r} makes a request depend on others in its batch")
    for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedConfig(f"config.json: {name!r} is missing")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - KINDS):
        raise UnsupportedConfig(f"{config.architectures}: layers of type {', '.join(unknown)} are not supported")
    return config


def _load(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model as transformers builds it.

    Raises:
        UnsupportedConfig: weights are missing, or it has no attention interface.
    """
    transformers.logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise UnsupportedConfig(f"transformers cannot load this model: {error}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        missing = [*report["missing_keys"], *report["mismatched_keys"]][:8]
        raise UnsupportedConfig(f"the checkpoint lacks {', '.join(map(str, missing))}")
    return model.eval().to(device)


def _pack_linears(model: nn.Module, ops: Ops) -> None:
    """Replace linear layers; a packed layer owns its weights, so the original is freed at once."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _PackedLinear(ops, child.weight, child.bias))
            elif type(child) is Conv1D:
                weight, bias = child.get_parameter("weight"), child.get_parameter("bias")
                setattr(parent, name, _PackedLinear(ops, torch.t(weight), bias))


def _probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """A fixed short prompt that avoids the special tokens at either end of a vocabulary."""
    return (torch.arange(PROBE_TOKENS, device=device) * 7919 + vocab_size // 3) % max(1, vocab_size // 2)


def _batch(ids: torch.Tensor, start: int) -> Batch:
    """One row in block 0."""
    tables = torch.zeros((1, 1), dtype=torch.int32, device=ids.device)
    return replace(batch_of_spans([(start, start + len(ids))], tables), token_ids=ids)
