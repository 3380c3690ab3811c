"""Builds the demo model's tokenizer: bytes, plus whole tokens for what the templates repeat.

A byte-level vocabulary keeps spelling visible, so that reversing and counting letters can be
learned by a tiny model. Boilerplate (the tool preamble, JSON punctuation, frequent words of
the phrasings) gets tokens of its own, which makes training several times faster. Such a
token only ever matches a whole word, so random words are never cut into odd pieces.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from demo.schema import Example
from demo.tasks import training_example
from demo.words import CAPITALS, CITIES, NAMES, WORDS

VOCAB_SIZE = 512
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
TAGS = ("<tool_call>", "</tool_call>")  # visible text, as in other Hermes-style models
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")

# Fixed strings of the template and of JSON schemas, each a token. Tags are split off first,
# hence the three parts of the closing instruction.
CHUNKS = (
    "system\n",
    "user\n",
    "assistant\n",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and "
    "arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    "<tool_response>\n",
    "\n</tool_response>",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "',
    'string"',
    'integer"',
    '}, "required": ["',
    '"]}}}',
    '"}}}}',
    "}}}}",
    ', "description": "',
    '\n{"name": "',
    '", "arguments": {"',
    '"}}\n',
    "}}\n",
    '{"',
    '": "',
    '": ',
    '", "',
    ', "',
    '"}',
    ", ",
    " + ",
    " - ",
    " = ",
)


def _byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in symbols)
    return symbols | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_SYMBOLS = _byte_symbols()


def _symbol(text: str) -> str:
    return "".join(BYTE_SYMBOLS[byte] for byte in text.encode())


def render(example: Example) -> str:
    """The whole conversation as text, the answer included."""
    messages = [*example.messages, example.answer]
    return _template().render(messages=messages, tools=example.tools or None)


def render_prompt(example: Example) -> str:
    """The conversation up to where the answer starts."""
    return _template().render(
        messages=example.messages, tools=example.tools or None, add_generation_prompt=True
    )


def _make_template():  # type: ignore[no-untyped-def]  # jinja2 compiles at run time
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(CHAT_TEMPLATE)


_COMPILED = _make_template()


def _template():  # type: ignore[no-untyped-def]
    return _COMPILED


def frequent_words(count: int, samples: int = 6000) -> list[str]:
    """The words worth a token: those that save most, words to be spelled excluded."""
    spelled = {*WORDS, *NAMES, "Hello", "Pagoda"}
    for name in (*CAPITALS, *CAPITALS.values(), *CITIES):
        spelled |= {part for part in name.split() if part[0].isupper()}
    rng, found = random.Random("words"), Counter[str]()
    for _ in range(samples):
        text = render(training_example(rng))
        for chunk in sorted(CHUNKS, key=len, reverse=True):
            text = text.replace(chunk, "\0")
        text = re.sub(r"<\S*?>", "\0", text)
        found.update(re.findall(r" [A-Za-z]+(?![A-Za-z])|(?<![A-Za-z])[A-Za-z]{2,}", text))
    saved = {
        word: times * (len(word) - 1)
        for word, times in found.items()
        if word.strip() not in spelled
    }
    return sorted(saved, key=lambda word: (-saved[word], word))[:count]


def _pattern(words: list[str]) -> str:
    """What is cut out as a token of its own; longer alternatives come first."""
    chunks = "|".join(re.escape(c) for c in sorted(CHUNKS, key=len, reverse=True))
    # The alternatives start with a letter or a space; neither may follow another letter
    # unless it is the space, and none may be continued by one.
    spaced = "|".join(sorted((w[1:] for w in words if w[0] == " "), key=len, reverse=True))
    bare = "|".join(sorted((w for w in words if w[0] != " "), key=len, reverse=True))
    return f"{chunks}| (?:{spaced})(?![A-Za-z])|(?<![A-Za-z])(?:{bare})(?![A-Za-z])"


def build_tokenizer() -> Tokenizer:
    """A tokenizers.Tokenizer with exactly VOCAB_SIZE entries."""
    words = frequent_words(VOCAB_SIZE - 256 - len(CHUNKS) - len(SPECIAL) - len(TAGS))
    entries = [BYTE_SYMBOLS[byte] for byte in range(256)]
    entries += [_symbol(text) for text in (*CHUNKS, *words)]
    vocab = {entry: index for index, entry in enumerate(entries)}
    # No merges: a piece is either one entry of the vocabulary as a whole, or single bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern(words)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary of {tokenizer.get_vocab_size()}, not {VOCAB_SIZE}")
    return tokenizer


def export_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(index): {"content": token.content, "lstrip": False, "normalized": False,
                     "rstrip": False, "single_word": False, "special": token.special}
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text)
