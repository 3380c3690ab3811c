"""The contents of adapter_config.json as PEFT defines them: which matrices have an adapter, its rank and its scale.

Every field is known here: used, harmless, or refused by name as soon as it asks for anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pagoda_proto.adapters.files import AdapterError
from pagoda_worker.adapters.patterns import MAX_NAMES, Matches, by_name, by_pattern, compiled

ALL_LINEAR = "all-linear"
# Purpose, training, how the base model stores its matrices, and what belongs to something refused in REASONS; tensors
# that are served do not depend on these.
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_type",
    "peft_version", "revision", "runtime_config", "loftq_config", "eva_config", "corda_config", "megatron_config",
    "megatron_core", "lora_ga_config", "qalora_group_size",
})  # fmt: skip
TAKEN = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "task_type", "bias", "modules_to_save",
    "ensure_weight_tying",
})  # fmt: skip
KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the model's own weights unchanged."""
REASONS = {
    "use_dora": "DoRA is not supported, as it scales the model's own weights",
    "lora_bias": "adapters with biases are not supported",
    "layer_replication": "repeated layers are not supported",
    "trainable_token_indices": "retrained token embeddings are not supported",
    "target_parameters": "adapters for experts stored in one tensor are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported, an adapter applies to the whole prompt",
    "use_qalora": "QALoRA is not supported, as it pools the inputs",
    "use_bdlora": "BD-LoRA is not supported, as its matrices are blocks",
    "arrow_config": "Arrow is not supported, as it chooses among adapters for each token",
    "kasa_config": "KaSA is not supported, as it changes the model's own weights",
    "monteclora_config": "MonteCLoRA is not supported, as it has more tensors than A and B",
    "velora_config": "VeLoRA is not supported, as it has more tensors than A and B",
}
ANY_LAYERS = r".*?\.[^.]*\.(\d+)\."
OF_LAYERS = r"(?:^|.*?\.){}\.(\d+)\."


@dataclass(frozen=True)
class PeftConfig:
    """Looks up modules by name. `linear`: `targets` excludes embeddings; `saved`: suffixes of modules that the file
    holds whole; `tying`: tied matrices must stay the same."""

    targets: Matches
    rank: Callable[[str], int]
    scale: Callable[[str], float]
    linear: bool = False
    saved: tuple[str, ...] = ()
    tying: bool = False

    def replaces(self, name: str) -> bool:
        """Whether the module is one of `saved`, or in one: PEFT adds nothing to these."""
        return any(f".{one}." in f".{name}." for one in self.saved)


def read_peft(config: Mapping[str, Any]) -> PeftConfig:
    """Raises AdapterError for anything but LoRA as supported here; the message names the field."""
    _refuse(config)
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if not _is_rank(rank):
        raise AdapterError(f"r: must be a whole number of at least 1, got {rank!r:.100}")
    if not _is_alpha(alpha):
        raise AdapterError(f"lora_alpha: must be a number, got {alpha!r:.100}")
    ranks = by_pattern("rank_pattern", config.get("rank_pattern") or {}, _is_rank)
    alphas = by_pattern("alpha_pattern", config.get("alpha_pattern") or {}, _is_alpha)
    rooted = _flag(config, "use_rslora")

    def rank_of(name: str) -> int:
        found = ranks(name)
        return rank if found is None else found

    def scale_of(name: str) -> float:
        found = alphas(name)
        own = float(alpha if found is None else found)
        return own / (math.sqrt(rank_of(name)) if rooted else rank_of(name))

    linear = config.get("target_modules") == ALL_LINEAR
    tying = _flag(config, "ensure_weight_tying")
    return PeftConfig(_targets(config), rank_of, scale_of, linear, _saved(config), tying)


def _refuse(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type: only 'LORA' is served, got {config.get('peft_type')!r:.100}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type: only 'CAUSAL_LM' is served, got {config['task_type']!r:.100}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias: must be 'none', as retrained biases are not supported, got {config['bias']!r:.100}")
    begun = config.get("init_lora_weights", True)
    if not isinstance(begun, bool | str | None) or begun not in KEEP_THE_BASE:
        why = "it changed the model's own weights, so convert the adapter first"
        raise AdapterError(f"init_lora_weights: {why}, got {begun!r:.100}")
    for field, value in config.items():
        if value and field not in HARMLESS and field not in TAKEN:
            raise AdapterError(f"{field[:100]}: {REASONS.get(field, 'unknown field')}, got {value!r:.100}")


def _targets(config: Mapping[str, Any]) -> Matches:
    value, none = config.get("target_modules"), config.get("exclude_modules")
    if not value:
        raise AdapterError(f"target_modules: must name modules, got {value!r:.100}")
    wanted = _all_but_heads if value == ALL_LINEAR else by_name("target_modules", value)
    excluded = by_name("exclude_modules", none) if none else lambda name: False
    layers = _layers(config)
    return lambda name: wanted(name) and not excluded(name) and layers(name)


def _saved(config: Mapping[str, Any]) -> tuple[str, ...]:
    value = config.get("modules_to_save") or []
    if not isinstance(value, list) or len(value) > MAX_NAMES or not all(isinstance(one, str) and one for one in value):
        raise AdapterError(f"modules_to_save: must be a list of names, got {value!r:.100}")
    return tuple(value)


def _all_but_heads(name: str) -> bool:
    return "." in name  # the output matrix is at the top level


def _layers(config: Mapping[str, Any]) -> Matches:
    """Whether a module is in one of `layers_to_transform`, or named in full. Its layer is the first number in its name
    after what `layers_pattern` says."""
    value, within = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if value is None or value == []:
        if within and value is None:
            raise AdapterError(f"layers_pattern: goes only with layers_to_transform, got {within!r:.100}")
        return lambda name: True
    if isinstance(config["target_modules"], str):
        raise AdapterError(f"layers_to_transform: goes only with a list of target_modules, got {value!r:.100}")
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise AdapterError(f"layers_to_transform: must be layer numbers, got {value!r:.100}")
    named, layers, patterns = frozenset(config["target_modules"]), frozenset(numbers), _layer_patterns(within)

    def is_in(name: str) -> bool:
        if name in named:
            return True
        found = next(filter(None, (pattern.match(name) for pattern in patterns)), None)
        return found is not None and int(found[found.re.groups]) in layers

    return is_in


def _layer_patterns(within: object) -> list[re.Pattern[str]]:
    """The last group of each is a layer's number."""
    several = [within] if isinstance(within, str) else within
    if not isinstance(several, list) or not all(isinstance(one, str) and one for one in several):
        raise AdapterError(f"layers_pattern: must be a name or a list of names, got {within!r:.100}")
    return compiled("layers_pattern", several, OF_LAYERS) if several else [re.compile(ANY_LAYERS)]


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field) or False
    if not isinstance(value, bool):
        raise AdapterError(f"{field}: must be true or false, got {value!r:.100}")
    return value


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_alpha(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
