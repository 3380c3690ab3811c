"""Adapters from files to slots: hostile files change nothing, and only slots that are not in use are reassigned."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.adapters.files import PREFIX, Tensors, embedding_factors, factors, write

from pagoda_proto.adapters.files import CONFIG, WEIGHTS, AdapterError, AdapterGone, identify
from pagoda_proto.adapters.identity import Adapter
from pagoda_worker.adapters.places import Module, Places, Whole
from pagoda_worker.adapters.reading import Limits, read_adapter
from pagoda_worker.adapters.store import MIB, NO_ADAPTERS, AdapterStore, Room
from pagoda_worker.models.linear import AdapterTensors

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (32, 16), DOWN: (16, 48)}
EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
MODULES = {name: Module(name, *shape) for name, shape in SHAPES.items()}
MODULES |= {HEAD: Module(HEAD, 40, 16), EMBED: Module(EMBED, 16, 40, embedding=True)}
WHOLE = {f"{end}.weight": Whole(f"{end}.weight", (40, 16), end) for end in (HEAD, EMBED)}
WHOLE |= {f"{NORM}.{kind}": Whole(f"{NORM}.{kind}", (16,), NORM) for kind in ("weight", "bias")}
QUERY_NORM, KEY_NORM = (f"model.layers.0.self_attn.{kind}_norm" for kind in "qk")
WHOLE |= {f"{one}.weight": Whole(f"{one}.weight", (16,), QUERY_NORM) for one in (QUERY_NORM, KEY_NORM)}
OTHER_HEAD = "embed_out"  # its name in another checkpoint of the family
MODULES[OTHER_HEAD], WHOLE[f"{OTHER_HEAD}.weight"] = MODULES[HEAD], WHOLE[f"{HEAD}.weight"]
SPELLINGS = ({*SHAPES, EMBED, HEAD}, {*SHAPES, EMBED, OTHER_HEAD})
PLACES = Places(MODULES, WHOLE, SPELLINGS, tied=frozenset({HEAD, EMBED}))
LIMITS = Limits(rank=16, num_bytes=100_000)
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


class Slots:
    """Records what the model was told to add, by slot."""

    def __init__(self) -> None:
        self.filled: dict[int, AdapterTensors] = {}

    def adapt(self, slot: int, tensors: AdapterTensors) -> None:
        self.filled[slot] = tensors

    def differing(self, tensors: AdapterTensors) -> AdapterTensors:
        return tensors

    def adapter_bytes(self, ranks: Mapping[str, int], whole: Iterable[str]) -> int:
        return MIB * sum(ranks.values())


def store_of(model: Slots, *allowed: Path, count: int = 2) -> AdapterStore:
    return AdapterStore(model, PLACES, torch.bfloat16, count=count, limits=LIMITS, allowed=allowed)


def made(path: Path, seed: int = 1) -> Adapter:
    return identify(write(path, factors(SHAPES, seed=seed)), LIMITS.num_bytes)


def test_an_adapter_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors, model = factors(SHAPES), Slots()
    adapter = identify(write(tmp_path, tensors), LIMITS.num_bytes)
    assert store_of(model, tmp_path).slot(adapter, ()) == 0
    found = model.filled[0].factors[Q]
    assert torch.equal(found.a, tensors[A].bfloat16())
    assert torch.equal(found.b, tensors[B].bfloat16())
    assert found.scale == 2.0


def test_what_comes_whole_is_read_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    norm = {f"{PREFIX}{NORM}.{kind}": torch.full((16,), 2.0) for kind in ("weight", "bias")}
    write(tmp_path, factors(SHAPES) | heads(".base_layer") | norm, modules_to_save=["norm"])
    model = Slots()
    store_of(model, tmp_path).load("one", tmp_path)
    assert {name: one.shape for name, one in model.filled[0].whole.items()} == {
        f"{HEAD}.weight": (40, 16), f"{NORM}.weight": (16,), f"{NORM}.bias": (16,),
    }  # fmt: skip


def test_one_that_takes_more_than_is_kept_for_each_is_refused_and_what_is_left_is_told(tmp_path: Path) -> None:
    model, adapter = Slots(), made(tmp_path)
    store = store_of(model, tmp_path)
    store.bound(15 * MIB, 9)
    with pytest.raises(AdapterError, match=r"takes 16.0 MiB of memory, more than the 15.0 MiB.*max_lora_gib"):
        store.slot(adapter, ())
    assert store.room.left_bytes == 30 * MIB
    store.bound(20 * MIB, 9)
    store.slot(adapter, ())
    assert store.room == Room(2, 20 * MIB, 16 * MIB)
    assert store.room.left_bytes == 24 * MIB


def test_slots_go_to_who_needs_them_and_stay_with_who_is_in_use(tmp_path: Path) -> None:
    model, adapters = Slots(), [made(tmp_path / str(seed), seed) for seed in range(4)]
    store = store_of(model, tmp_path)
    assert [store.slot(adapters[i], ()) for i in (0, 1, 0)] == [0, 1, 0]
    assert store.slot(adapters[2], {0}) == 1
    assert store.slot(adapters[0], ()) == 0, "it was there all the time"
    with pytest.raises(AdapterError, match="max_loras"):
        store.slot(adapters[3], {0, 1})
    assert store.slot(adapters[3], {0}) == 1
    assert store.slot(adapters[0], {0}) == 0


def test_files_that_have_changed_are_another_adapter(tmp_path: Path) -> None:
    model, old = Slots(), made(tmp_path / "a")
    store = store_of(model, tmp_path)
    assert store.slot(old, ()) == 0
    new = made(tmp_path / "a", seed=2)
    assert store.slot(new, {0}) == 1
    assert store.slot(old, {1}) == 0, "what is here is kept"
    with pytest.raises(AdapterGone, match="have changed"):
        store_of(Slots(), tmp_path).slot(old, ())


def test_files_that_are_damaged_or_gone_are_no_fault_of_who_asks(tmp_path: Path) -> None:
    path = tmp_path / "a"
    named, store = made(path), store_of(Slots(), tmp_path)
    harms: list[tuple[Callable[[], object], str]] = [
        (lambda: (path / WEIGHTS).write_bytes(b"less"), "have changed"),
        (lambda: write(path, factors(SHAPES), use_dora=True), "have changed"),
        (lambda: (path / WEIGHTS).write_bytes(bytes(LIMITS.num_bytes + 1)), "cannot be read: .* more than"),
        (lambda: (path / CONFIG).write_text("{"), "cannot be read: .* not JSON"),
        ((path / CONFIG).unlink, "cannot be read: adapter_config.json: No such file"),
        (lambda: path.rename(tmp_path / "b"), "no such directory"),
    ]
    for harm, why in harms:
        harm()
        with pytest.raises(AdapterGone, match=why):
            store.slot(named, ())


def test_what_lies_elsewhere_is_not_read(tmp_path: Path) -> None:
    outside, allowed = made(tmp_path / "outside"), tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(outside.path)
    for path in (outside.path, str(allowed / "link"), str(allowed / ".." / "outside"), "outside"):
        with pytest.raises(AdapterError):
            store_of(Slots(), allowed).slot(Adapter(outside.digest, path), ())


def test_a_worker_without_adapters_says_so() -> None:
    with pytest.raises(AdapterError, match="lora_modules"):
        NO_ADAPTERS.slot(Adapter("1" * 64, "/a"), ())


def test_of_ends_that_stay_tied_the_config_names_the_embedding_alone(tmp_path: Path) -> None:
    ends = embedding_factors(EMBED, (40, 16), 8) | factors({HEAD: (40, 16)})
    path = write(tmp_path, ends, target_modules=[EMBED], ensure_weight_tying=True)
    found = read_adapter(path, identify(path, 10**6).digest, PLACES, LIMITS, torch.float32)
    assert found.factors.keys() == {EMBED, HEAD}
    write(tmp_path, ends, target_modules=[EMBED])
    with pytest.raises(AdapterError, match=r"unknown tensors, as target_modules.*lm_head"):
        read_adapter(path, identify(path, 10**6).digest, PLACES, LIMITS, torch.float32)


@pytest.mark.parametrize(("pattern", "rank", "scales"), [("embed_tokens", 5, (3.2, 2.0)), ("lm_head", 8, (2.0, 3.2))])
def test_ends_that_stay_tied_have_the_rank_of_the_embedding_and_each_its_own_scale(
    pattern: str, rank: int, scales: tuple[float, float], tmp_path: Path
) -> None:
    """As PEFT 0.21 writes and applies them."""
    ends = embedding_factors(EMBED, (40, 16), rank) | factors({HEAD: (40, 16)}, lambda name: rank)
    path = write(tmp_path, ends, target_modules=[EMBED], ensure_weight_tying=True, rank_pattern={pattern: 5})
    found = read_adapter(path, identify(path, 10**6).digest, PLACES, LIMITS, torch.float32).factors
    assert (len(found[EMBED].a), len(found[HEAD].a)) == (rank, rank)
    assert (found[EMBED].scale, found[HEAD].scale) == scales


def without(tensors: Tensors, name: str) -> Tensors:
    return {own: tensor for own, tensor in tensors.items() if own != name}


def of(tensors: Tensors, module: str) -> Tensors:
    return {own: tensor for own, tensor in tensors.items() if f"{module}." in own}


def heads(*between: str) -> Tensors:
    return {f"{PREFIX}{HEAD}{one}.weight": torch.ones(40, 16) for one in between}


ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}
Change = Callable[[Tensors], Tensors]
HOSTILE: list[tuple[Change, dict[str, Any], str]] = [
    (lambda t: t | {"other": torch.zeros(1)}, {}, "unknown tensors: other"),
    (lambda t: t | {f"{PREFIX}{Q}.lora_magnitude_vector": torch.zeros(1)}, {}, "unknown tensors"),
    (lambda t: t | factors({"model.layers.7.self_attn.q_proj": (32, 16)}), {}, "unknown tensors"),
    (lambda t: t | {f"{PREFIX}{EMBED}.lora_embedding_A": torch.zeros(8, 9)}, {}, "unknown tensors"),
    (lambda t: t | {f"{PREFIX}{EMBED}.lora_embedding_A": torch.zeros(8, 40)}, ENDS, "missing tensors.*embedding_B"),
    (lambda t: t | {f"{PREFIX}{EMBED}.lora_A.weight": torch.zeros(8, 40)}, ENDS, "unknown tensors"),
    (lambda t: t | {f"{PREFIX}{HEAD}.weight": torch.zeros(41, 16)}, {}, r"shape \[41, 16\], expected \[40, 16\]"),
    (
        lambda t: t | {f"{PREFIX}{Q}.weight": torch.zeros(32, 16)},
        {},
        rf"only norms, .* replaced whole, not these: .*{Q}",
    ),
    (lambda t: t | {f"{PREFIX}{NORM}.weight": torch.zeros(16)}, {}, f"missing tensors: {NORM}.bias"),
    (
        lambda t: t | {f"{PREFIX}{QUERY_NORM}.weight": torch.zeros(16)},
        {"modules_to_save": ["q_norm"]},
        f"missing tensors, as norms of queries and keys can only be replaced together: {KEY_NORM}.weight",
    ),
    (lambda t: t, {"modules_to_save": ["norm", "q_proj"]}, "modules_to_save: .* no tensors for: norm, q_proj"),
    (lambda t: t | heads("", ".base_layer"), {}, "duplicate"),
    (
        lambda t: t | heads(""),
        {"ensure_weight_tying": True},
        "ensure_weight_tying.*for each of lm_head and model.embed",
    ),
    (lambda t: t, {"target_modules": ["q_proj"]}, "unknown tensors.*down_proj"),
    (
        lambda t: t | heads("") | {f"{PREFIX}{OTHER_HEAD}.weight": torch.zeros(40, 16)},
        {},
        "duplicate tensors: .*embed_out.weight, .*lm_head.weight",
    ),
    (
        lambda t: t | factors({HEAD: (40, 16), OTHER_HEAD: (40, 16)}),
        {"target_modules": ["q_proj", "down_proj", HEAD, OTHER_HEAD]},
        "duplicate matrices: embed_out, lm_head",
    ),
    (lambda t: without(t, B), {}, "missing tensors.*lora_B"),
    (lambda t: of(t, Q), {"target_modules": ["q_proj", "down_proj"]}, f"target_modules: .* no tensors for: {DOWN}"),
    (lambda t: of(t, Q), {"target_modules": [Q, "down_proj", "up_proj"]}, f"no tensors for: {DOWN}$"),
    (lambda t: of(t, Q), {"target_modules": r".*\.[01]\..*_proj"}, f"target_modules: .* no tensors for: {DOWN}"),
    (lambda t: of(t, Q), {"target_modules": "all-linear"}, f"target_modules: .* no tensors for: {DOWN}"),
    (lambda t: t, {"target_modules": ["q_proj", "down_proj", EMBED]}, f"target_modules: .* no tensors for: {EMBED}"),
    (lambda t: heads(""), {"modules_to_save": [HEAD]}, f"target_modules: .* no tensors for: {Q}, {DOWN}"),
    (
        lambda t: t,
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1], "layers_pattern": "blubb"},
        "unknown tensors, as .*layers_pattern.*q_proj",
    ),
    (lambda t: {}, {}, "none of its tensors"),
    (lambda t: t | {A: t[A][:, :8].contiguous()}, {}, r"shape \[8, 8\], expected \[8, 16\]"),
    (lambda t: t | {A: t[A].T.contiguous()}, {}, "has shape"),
    (lambda t: t | {A: t[A].flatten()}, {}, "has shape"),
    (lambda t: t | {A: t[A].to(torch.int8)}, {}, "is I8"),
    (lambda t: t, {"r": 4}, r"expected \[4, 16\]"),
    (lambda t: factors(SHAPES, lambda name: 17), {"r": 17}, "rank 17, more than max_lora_rank=16"),
    (lambda t: t, {"rank_pattern": {"q_proj": 2**30}}, "more than max_lora_rank=16"),
]


COMPLETE: list[tuple[Change, dict[str, Any]]] = [
    (lambda t: of(t, Q), {"target_modules": ["q_proj", "of_no_model"]}),
    (lambda t: of(t, Q), {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 0}),
    (lambda t: of(t, Q), {"target_modules": [Q, "down_proj"], "layers_to_transform": [7], "layers_pattern": "h"}),
    (lambda t: of(t, DOWN), {"exclude_modules": ["q_proj"]}),
    (lambda t: of(t, Q), {"exclude_modules": r".*\.1\..*"}),
    (lambda t: t | heads(""), {"target_modules": ["q_proj", "down_proj", HEAD], "modules_to_save": [HEAD]}),
    (
        lambda t: t | factors({OTHER_HEAD: (40, 16)}),
        {"target_modules": ["q_proj", "down_proj", HEAD, OTHER_HEAD]},
    ),
    (
        lambda t: t | factors({OTHER_HEAD: (40, 16)}),
        {"target_modules": ["q_proj", "down_proj", HEAD, OTHER_HEAD], "exclude_modules": [HEAD]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "config"), COMPLETE, ids=[str(config) for _, config in COMPLETE])
def test_modules_that_peft_would_not_write_are_not_missed(
    change: Change, config: dict[str, Any], tmp_path: Path
) -> None:
    tensors, model = change(factors(SHAPES)), Slots()
    store_of(model, tmp_path).load("one", write(tmp_path, tensors, **config))
    found = model.filled[0]
    assert 2 * len(found.factors) + len(found.whole) == len(tensors)


@pytest.mark.parametrize(("change", "config", "why"), HOSTILE, ids=[why for *_, why in HOSTILE])
def test_what_does_not_fit_the_model_is_refused_with_its_names(
    change: Change, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    adapter = identify(write(tmp_path, change(factors(SHAPES)), **config), LIMITS.num_bytes)
    model = Slots()
    with pytest.raises(AdapterError, match=why):
        store_of(model, tmp_path).slot(adapter, ())
    assert not model.filled


def header(fields: object, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(shape: object, offsets: object, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = [
    b"", b"1234567", header({}, 2**63), header({}, 2**64 - 1), header(b"{" * 90_000), header(b"NaN"), header([]),
    header({A: entry([8, 16], [0, 512])}), header({A: entry([-8, 16], [0, 512])}) + bytes(512),
    header({A: entry([8, 16], [512, 0])}) + bytes(512), header({A: entry([2**62, 4], [0, 512])}) + bytes(512),
    header({A: entry([8, 1e400], [0, 512])}) + bytes(512), header({A: entry("NaN", [0, 512])}) + bytes(512),
    header({A: entry([8, 16], [0, 512], "F4")}) + bytes(512), header({A: None}), header({A: entry([8, 16], 3)}),
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_files_that_are_not_sound_are_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, factors(SHAPES))
    (tmp_path / WEIGHTS).write_bytes(content)
    adapter = identify(tmp_path, LIMITS.num_bytes)
    with pytest.raises(AdapterError):
        store_of(Slots(), tmp_path).slot(adapter, ())


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    adapter = made(tmp_path)
    small = Limits(rank=16, num_bytes=100)
    with pytest.raises(AdapterError, match="more than the 100"):
        read_adapter(tmp_path, adapter.digest, PLACES, small, torch.bfloat16)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_done_to_the_bytes_they_are_read_as_they_are_or_refused(data: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("adapter")
    write(path, factors(SHAPES))
    content = bytearray((path / WEIGHTS).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content) - 1, 600)))] = data.draw(st.integers(0, 255))
    (path / WEIGHTS).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    (path / CONFIG).write_text((path / CONFIG).read_text())
    model = Slots()
    try:
        assert store_of(model, path).slot(identify(path, LIMITS.num_bytes), ()) == 0
    except AdapterError:
        assert not model.filled
    else:
        assert {name: tuple(one.b.shape) for name, one in model.filled[0].factors.items()} == {
            Q: (32, 8),
            DOWN: (16, 8),
        }
