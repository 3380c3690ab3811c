"""Creates tiny model directories: with a byte-level tokenizer, or a SentencePiece-like one with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagoda_gateway.text.vocabulary import byte_level_alphabet

DEMO_MODEL = Path(__file__).parents[2] / "services/pagoda/demo_model"
EOS, START = "<|im_end|>", "<|im_start|>"
SPECIALS = ("<|endoftext|>", START, EOS)
WORDS = ("Ġhello", "Ġworld", "Ġthe", "hello", "world", "the", "<", "tool", "call", "ĊĊ")
MAX_MODEL_LEN = 256

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> use <tool_call></tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if mood %}({{ mood }}){% endif %}{% endif %}"""


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merged words, tool tags as visible added tokens, three special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(byte_level_alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merged = word[:end]
            if merged not in vocab:
                vocab[merged] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def byte_fallback_tokenizer(strip: bool = True) -> Tokenizer:
    """Pieces with U+2581 for a space, single bytes for everything else, as in Llama-2 and Gemma checkpoints."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "h", "e", "l", "o", "é", "日", "▁h", "he", "▁日", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("▁", "h"), ("h", "e"), ("▁", "日"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """Whole words and `##` pieces, [CLS] and [SEP] around texts and pairs, as in BERT."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "dog", "cat", "##s", "query", ":", "what", "is"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def write_reader_dir(root: Path, architecture: str = "BertModel", **config: Any) -> Path:
    """An embedding or scoring model, as far as its config.json says so."""
    fields = {"architectures": [architecture], "hidden_size": 3, "max_position_embeddings": 16}
    return write_model_dir(root, word_tokenizer(), config=fields | config, tokenizer_config={"chat_template": None})


def write_model_dir(root: Path, tokenizer: Tokenizer | None = None, **changes: dict[str, Any]) -> Path:
    """`changes` replace keys of the named files: config, generation_config, tokenizer_config."""
    tokenizer = tokenizer or byte_level_tokenizer()
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config": {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": MAX_MODEL_LEN},
        "generation_config": {"eos_token_id": tokenizer.token_to_id(EOS)},
        "tokenizer_config": {"eos_token": EOS, "chat_template": CHAT_TEMPLATE},
    }
    for name, content in files.items():
        merged = content | changes.get(name, {})
        kept = {key: value for key, value in merged.items() if value is not None}
        (root / f"{name}.json").write_text(json.dumps(kept))
    return root
