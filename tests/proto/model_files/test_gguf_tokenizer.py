"""A tokenizer written to a GGUF file and read back gives the same ids as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.model_dir import byte_fallback_tokenizer
from tests.gguf_files import GgufFile, demo_pairs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges

from pagoda_proto.model_files.gguf import BadGguf, Gguf, read_gguf
from pagoda_proto.model_files.gguf_tokenizer import end_ids, tokenizer_config_of, tokenizer_of
from pagoda_proto.model_files.pre_tokenizers import PRE_TOKENIZERS

# As in the tokenizer.json of Llama 3, Qwen 2, GPT-4o and Mistral's Tekken.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
SAMPLE = [
    "The sum isn't 1234567, it's 89 and we'll see; I'M SURE THEY'D 'VE known.\n\n  if x == 10:\n\treturn a/path//b\r\n",
    "naïve café École Ångström 東京 日本語 Привет мир HTTPServer aB Ab AB",
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from([*"aB é'\n\t\r/.1日 ́", "'re", "'S", "  ", "THE", "sum", "<|end|>", "<tool>"])).map(
        "".join
    ),
)
SPECIALS, TAG = ("<|begin|>", "<|end|>"), "<tool>"


def cut_by(*patterns: str) -> Any:
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "olmo"), lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r"),
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "llama-bpe": lambda: cut_by(LLAMA3),
    "dbrx": lambda: cut_by(LLAMA3),
    "smaug-bpe": lambda: cut_by(LLAMA3),
    "glm4": lambda: cut_by(LLAMA3),
    "deepseek-coder": lambda: cut_by(*DEEPSEEK_CODER),
    "deepseek-v3": lambda: cut_by(*DEEPSEEK_V3),
    "qwen2": lambda: cut_by(QWEN2),
    "deepseek-r1-qwen": lambda: cut_by(QWEN2),
    "gpt-4o": lambda: cut_by(GPT4O),
    "tekken": lambda: cut_by(TEKKEN),
}


@cache
def byte_level(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken", "glm4")))
    tokenizer.normalizer = normalizers.NFC() if pre in ("qwen2", "command-r", "olmo") else None
    tokenizer.pre_tokenizer = WORDS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(TAG, special=False, normalized=False)])
    return tokenizer


def exported(tokenizer: Tokenizer, **pairs: Any) -> dict[str, Any]:
    """The vocabulary as converters write it."""
    definition = json.loads(tokenizer.to_str())
    tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    kinds = dict.fromkeys(tokens, 1)
    kinds |= {i: 3 if token.special else 4 for i, token in tokenizer.get_added_tokens_decoder().items()}
    merges = [" ".join(pair) for pair in definition["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [kinds[i] for i in range(len(tokens))], **pairs,
    }  # fmt: skip


def opened(pairs: dict[str, Any], path: Path) -> Gguf:
    return read_gguf(GgufFile(pairs).write(path / "m.gguf"))


def made(gguf: Gguf) -> Tokenizer:
    content = tokenizer_of(gguf)
    return Tokenizer.from_str(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture(scope="module", params=WORDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A byte-level tokenizer, and the one read back from the file."""
    original = byte_level(request.param)
    pairs = exported(original, **{"tokenizer.ggml.pre": request.param, "tokenizer.ggml.add_bos_token": False})
    return original, made(opened(pairs, tmp_path_factory.mktemp("gguf")))


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_byte_level_ids_are_those_of_the_original(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, ours = pair
    assert ours.encode(text).ids == original.encode(text).ids


def test_byte_level_ids_of_running_text(pair: tuple[Tokenizer, Tokenizer]) -> None:
    original, ours = pair
    for text in SAMPLE:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == original.decode(ids)


def test_each_name_is_tried_or_another_name_of_one_that_is() -> None:
    tried = [PRE_TOKENIZERS[name] for name in WORDS]
    assert all(way in tried for way in PRE_TOKENIZERS.values())


@cache
def sentencepiece(prefixed: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer as transformers makes it from a SentencePiece model, and that model's pieces and scores as pairs."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = sorted(trained.get_vocab(), key=lambda token: (len(token) == 1, trained.get_vocab()[token]))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(learned)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = generate_merges(vocab, zip(pieces, scores, strict=True), skip_tokens=["<unk>", "<s>", "</s>"])
    whole = byte_fallback_tokenizer(strip=prefixed)
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.decoder = whole.normalizer, whole.decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return tokenizer, {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_space_prefix": prefixed,
    }  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["prefixed", "bare"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    original, pairs = sentencepiece(request.param)
    return original, made(opened(pairs, tmp_path_factory.mktemp("gguf")))


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(TEXTS, st.sampled_from(SAMPLE), st.just("a <s> b</s>")))
def test_sentencepiece_ids_are_those_of_the_original(pieces: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, ours = pieces
    ids = original.encode(text).ids
    assert ours.encode(text).ids == [1, *ids]  # BOS comes first, unless the file says otherwise
    assert ours.decode(ids) == original.decode(ids)


def test_phi_3_leaves_out_what_is_white_behind_special_tokens(tmp_path: Path) -> None:
    """Except behind a few of them; other models leave out nothing."""
    _, pairs = sentencepiece(True)

    def ids(arch: str, text: str) -> list[int]:
        return made(opened(pairs | {"general.architecture": arch}, tmp_path)).encode(text).ids

    assert ids("phi3", "</s>\n a") == ids("phi3", "</s>a") != ids("phi3", "<s>\n a")
    assert ids("phi3", "<s>\n a") == ids("llama", "<s>\n a")
    assert ids("llama", "</s>\n a") != ids("llama", "</s>a")


def test_no_text_makes_a_control_token(tmp_path: Path) -> None:
    """Even if its pieces could be merged into one."""
    _, pairs = sentencepiece(True)
    tokens = [*pairs["tokenizer.ggml.tokens"], "<", "s", "<s", "s>"]
    tokens = list(dict.fromkeys(tokens))
    kinds = pairs["tokenizer.ggml.token_type"] + [1] * (len(tokens) - len(pairs["tokenizer.ggml.tokens"]))
    scores = pairs["tokenizer.ggml.scores"] + [9.0] * (len(tokens) - len(pairs["tokenizer.ggml.tokens"]))
    new = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores}
    definition = tokenizer_of(opened(pairs | new, tmp_path))
    assert not isinstance(definition, str)
    assert "<s>" not in {"".join(merge) for merge in definition["model"]["merges"]}
    assert ["<", "s"] in definition["model"]["merges"]


def test_pieces_that_would_take_long_to_split_are_refused(tmp_path: Path) -> None:
    """A file of a few megabytes could take hours."""
    _, pairs = sentencepiece(True)
    new = {f"tokenizer.ggml.{name}": [*pairs[f"tokenizer.ggml.{name}"], last] for name, last in
           (("tokens", "a" * 40_000), ("scores", 0.0), ("token_type", 1))}  # fmt: skip
    with pytest.raises(BadGguf, match="its tokens are too long"):
        tokenizer_of(opened(pairs | new, tmp_path))


def test_beginnings_and_ends(tmp_path: Path) -> None:
    original = byte_level("llama-bpe")
    begin, end = (original.token_to_id(token) for token in SPECIALS)
    named = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": begin,
        "tokenizer.ggml.eos_token_id": end,
    }
    plain = original.encode("hello").ids
    assert made(opened(exported(original, **named), tmp_path)).encode("hello").ids == [begin, *plain]
    both = named | {"tokenizer.ggml.add_eos_token": True}
    assert made(opened(exported(original, **both), tmp_path)).encode("hello").ids == [begin, *plain, end]
    none = named | {"tokenizer.ggml.add_bos_token": False}
    assert made(opened(exported(original, **none), tmp_path)).encode("hello").ids == plain


def test_all_ends_of_an_answer_are_known(tmp_path: Path) -> None:
    """The eos, eot and eom tokens of the file, and control tokens that end answers in every model that has them."""
    pairs = demo_pairs()
    assert end_ids(opened(pairs, tmp_path)) == [511, 509]
    assert end_ids(opened(pairs | {"tokenizer.ggml.eot_token_id": 300}, tmp_path)) == [511, 300, 509]


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_a_special_token_may_be_none(tmp_path: Path, none: int) -> None:
    pairs = demo_pairs(False) | {f"tokenizer.ggml.{name}_token_id": none for name in ("eos", "bos", "padding", "eot")}
    gguf = opened(pairs, tmp_path)
    assert end_ids(gguf) == [509, 511]
    assert not tokenizer_config_of(gguf).keys() & {"bos_token", "eos_token", "pad_token"}


@pytest.mark.parametrize("name", ["eos", "eot", "eom", "bos", "unknown"])
@pytest.mark.parametrize("number", [512, -2])
def test_a_special_token_that_is_none_of_the_tokens_is_refused(tmp_path: Path, name: str, number: int) -> None:
    gguf = opened(demo_pairs(False) | {f"tokenizer.ggml.{name}_token_id": number}, tmp_path)
    with pytest.raises(BadGguf, match=f"'tokenizer.ggml.{name}_token_id' is {number}, which .* of its 512 tokens"):
        end_ids(gguf) if name[0] == "e" else tokenizer_config_of(gguf)


def test_padding_beyond_the_tokens_is_none(tmp_path: Path) -> None:
    """Nothing here pads, and published files say so."""
    gguf = opened(demo_pairs(False) | {"tokenizer.ggml.padding_token_id": 512}, tmp_path)
    assert "pad_token" not in tokenizer_config_of(gguf)


def test_where_an_answer_comes_in_parts_their_ends_do_not_end_it(tmp_path: Path) -> None:
    """As in gpt-oss, whatever end tokens the file names."""
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    pairs = demo_pairs() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3, 3]}
    pairs |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 1}
    assert end_ids(opened(pairs, tmp_path)) == [2, 3, 4]
    assert end_ids(opened(pairs | {"tokenizer.ggml.tokens": ["a", "<|end|>", "b", "c", "d"]}, tmp_path)) == [2, 1]
    plain = {"tokenizer.ggml.token_type": [1] * 5, "tokenizer.ggml.eos_token_id": 1}
    assert end_ids(opened(pairs | plain, tmp_path)) == [1]  # here tokens of these names are plain text


def test_what_stands_beside_the_tokenizer(tmp_path: Path) -> None:
    pairs = demo_pairs(whole_tokenizer=False) | {
        "tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use", "absent"],
        "tokenizer.chat_template.tool_use": "with tools", "tokenizer.ggml.bos_token_id": 509,
    }  # fmt: skip
    assert tokenizer_config_of(opened(pairs, tmp_path)) == {
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}],
    }  # fmt: skip


def test_a_file_with_the_whole_tokenizer_is_believed(tmp_path: Path) -> None:
    pairs = demo_pairs() | {"tokenizer.huggingface.json": '{"as": "it was"}'}
    assert tokenizer_of(opened(pairs, tmp_path)) == '{"as": "it was"}'


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "bert"}, "'bert' is not one of gpt2, llama"),
    ({"tokenizer.ggml.pre": "viking"}, "'tokenizer.ggml.pre' is 'viking', not one of .*llama-bpe"),
    ({"tokenizer.ggml.pre": None}, "'tokenizer.ggml.pre' is missing"),
    ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
    ({"tokenizer.ggml.token_type": [1]}, "has 1 types for 512 tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 512}, "511 tokens occur twice"),
    ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' must have 1 to"),
    ({"tokenizer.ggml.model": "llama"}, "must have a score for each of 512 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pairs = {key: value for key, value in (demo_pairs(False) | changes).items() if value is not None}
    with pytest.raises(BadGguf, match=message):
        tokenizer_of(opened(pairs, tmp_path))
