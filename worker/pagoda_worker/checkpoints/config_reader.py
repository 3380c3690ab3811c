"""Reads config.json so that no field that changes the arithmetic is overlooked.

A reader takes the fields it understands; `finish` refuses the file if a field is left that has a value (zero counts as
none: it turns off what it counts or scales) and is not known to be harmless. Both spellings of a field are read: those
of transformers 5 (`rope_parameters`, `dtype`) and the older ones (`rope_theta` and `rope_scaling`, `torch_dtype`).

A valid request for something we lack is an UnsupportedConfig, and the fallback may run the model. A value that no model
can have, such as a size of zero or a scaling factor that is text, is a CheckpointError: the model cannot run at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pagoda_worker.checkpoints.checkpoint import CheckpointError

T = TypeVar("T")
N = TypeVar("N", int, float)
TINY, HUGE = 2.0**-100, 2.0**100  # products of a few numbers within these stay in float32's range
SHOWN = 60  # characters

# Bookkeeping, training and generation settings: none of them changes a logit.
HARMLESS = {
    "_name_or_path", "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype",
    "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "hidden_dropout",
    "attn_implementation", "_attn_implementation", "auto_map", "tokenizer_class", "is_decoder", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "return_dict", "cache_implementation",
    "max_sequence_length", "task_specific_params", "unsloth_fixed", "unsloth_version", "name_or_path",
    "is_llama_config", "transformers.js_config", "_attn_implementation_autoset", "neftune_noise_alpha",
    "use_reentrant_checkpointing", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "classifier_dropout",
    "residual_dropout", "embedding_dropout", "layerdrop", "init_std", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "pretraining_tp",
}  # fmt: skip
LARGEST = 2**24  # of any size: a larger number is damage, and allocating by it would exhaust memory
MOST_LAYERS = 2**12
# Sizes by the names that all architectures give them: models run by transformers must keep to these, too.
MOST = {
    "num_hidden_layers": MOST_LAYERS, "num_layers": MOST_LAYERS, "n_layer": MOST_LAYERS, "n_layers": MOST_LAYERS,
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "max_position_embeddings", "sliding_window", "n_embd", "n_head", "n_positions"), LARGEST),
}  # fmt: skip
# Activations by transformers' names; those that a gate may have.
GATED = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
UNGATED = GATED | {"gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
# Known fields that must have the one value that means "off" or "the usual".
REQUIRED_VALUES = {"rope_interleaved": (False, None), "is_encoder_decoder": (False, None)}


class UnsupportedConfig(ValueError):
    """config.json asks for something the native implementation does not have; the message names the field."""


class ConfigReader:
    """Takes fields one by one and remembers which. `where` names the object in messages."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        where: str = "config.json",
        harmless: Iterable[str] = HARMLESS,
        required: Mapping[str, tuple[Any, ...]] = REQUIRED_VALUES,
    ) -> None:
        self._fields = fields
        self._where = where
        self._required = required
        self._taken = set(harmless) | set(required)

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A field that must be there, unless there is a default for its absence (or null).

        Raises:
            UnsupportedConfig: it is missing.
            CheckpointError: it is of another type.
        """
        value = self.maybe(name, kind)
        if value is None:
            if default is None:
                raise UnsupportedConfig(f"{self._where}: {name!r} is missing")
            return default
        return value

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """A field that may be missing or null."""
        self._taken.add(name)
        value = self._fields.get(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            value = float(value)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise invalid(self._where, f"{name!r} must be of type {kind.__name__}, got {shown(value)}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """An integer from 1 to the limit for this name."""
        return in_range(self._where, name, self.take(name, int, default), 1, MOST.get(name, LARGEST))

    def maybe_size(self, name: str) -> int | None:
        """See `size`; may be missing or null."""
        return None if self.maybe(name, int) is None else self.size(name)

    def positive(self, name: str, default: float) -> float:
        """A number above 0, finite also in float32."""
        return in_range(self._where, name, self.take(name, float, default), TINY, HUGE)

    def maybe_positive(self, name: str) -> float | None:
        """See `positive`; may be missing or null."""
        value = self.maybe(name, float)
        return None if value is None else self.positive(name, value)

    def choice(self, name: str, *allowed: T) -> T:
        """A field with one of a few values; the first is the default for its absence (or null)."""
        self._taken.add(name)
        value = self._fields.get(name)
        if value is None:
            return allowed[0]
        for one in allowed:
            if type(value) is type(one) and value == one:
                return one
        raise UnsupportedConfig(f"{self._where}: {name}={shown(value)} is not one of {', '.join(map(str, allowed))}")

    def ignore(self, name: str) -> None:
        """Accept a field that means nothing here."""
        self._taken.add(name)

    def activation(self, *names: str, known: Mapping[str, str] = GATED, default: str = "silu") -> str:
        """The activation under the first of `names` that is given, by its name in `known`."""
        given = [name for name in names if self.maybe(name, str) is not None]
        value = self.take(given[0], str) if given else default
        if value not in known:
            raise UnsupportedConfig(f"config.json: {given[0]}={shown(value)} is not one of {', '.join(known)}")
        return known[value]

    def layer_windows(
        self, window: int | None, kinds: list[str], limited: str = "sliding_attention"
    ) -> tuple[int | None, ...]:
        """The window of each layer, None except for kind `limited`; `layer_types` of the file wins over `kinds`, the
        rule of the family."""
        kinds = self.maybe("layer_types", list) or kinds
        known = {"full_attention": None, limited: window}
        wrong = sorted({str(kind) for kind in kinds} - set(known))
        if wrong or len(kinds) != self.size("num_hidden_layers"):
            named = limited.removesuffix("_attention")
            raise UnsupportedConfig(
                f"config.json: 'layer_types' must mark every layer as full or {named}, got {shown(kinds)}"
            )
        if window is None and limited in kinds:
            raise UnsupportedConfig("config.json: 'layer_types' has sliding layers, but 'sliding_window' is not set")
        return tuple(known[kind] for kind in kinds)

    def finish(self) -> None:
        """Raises UnsupportedConfig if fields with a meaning are left."""
        for name, allowed in self._required.items():
            if self._fields.get(name) not in allowed:
                raise UnsupportedConfig(f"{self._where}: {name}={shown(self._fields.get(name))} is not supported")
        left = {name: value for name, value in self._fields.items() if name not in self._taken}
        unknown = sorted(name for name, value in left.items() if value not in (None, False))
        if unknown:
            raise UnsupportedConfig(f"{self._where}: not supported natively: {', '.join(unknown)}")


def invalid(where: str, problem: str) -> CheckpointError:
    return CheckpointError(Path(where), [problem])


def shown(value: object) -> str:
    """A file's value, shortened for use in a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


def in_range(where: str, name: str, value: N, low: float, high: float) -> N:
    """`value`; raises CheckpointError unless it is from `low` to `high`, which excludes NaN."""
    if not low <= value <= high:
        raise invalid(where, f"{name!r} must be from {low:g} to {high:g}, got {shown(value)}")
    return value


def check_sizes(fields: Mapping[str, Any]) -> None:
    """For a config.json that nothing else has checked: raises CheckpointError for sizes no model has."""
    for name in MOST.keys() & fields.keys():
        value = fields[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            in_range("config.json", name, value, 0 if name == "sliding_window" else 1, MOST[name])
