"""Builds the demo model's tokenizer: bytes, plus whole tokens for what the templates repeat.

A byte-level vocabulary keeps spelling visible, so that reversing and counting letters can be
learned by a tiny model. Boilerplate (the tool preamble, JSON punctuation, frequent words of
the phrasings) gets tokens of its own, which makes training several times faster. Such a
token only ever matches a whole word, so random words are never cut into odd pieces.
"""

# ruff: noqa: SIM905  (a block of words reads better than a list of quoted ones)

from __future__ import annotations

import json
import re
from pathlib import Path

from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from demo.schema import Example

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
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
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

# The words that save most tokens over the generated conversations, in that order; "_" stands for
# a leading space. Words that the tasks ask to spell are not among them. The list is fixed, so
# that changing a task does not change the meaning of token ids.
FREQUENT_WORDS = tuple(
    word.replace("_", " ")
    for word in """
    _the _assistant _letters _capital _is _are _of _friendly _helpful _and You _backwards What _numbers Reverse
    _word _name _in _reverse _a _has assistant _from _question _Answer _answers _chatbot _JSON _order _you
    _briefly _concise The _reversed Please _Always _demo Extract _much _to Answer _brief integer Write _with
    _message order How _many _minus _for Calculate _user _fields Sort _uppercase _plus _an _me _around _am price
    _these age event name _ascending _dollars _that _alarm _meet Compute location _price Your weather _quantity
    _as _weather quantity Count _lives _integers message get reverse _years title Number recipient _Extract what
    _know _tiny _AI numbers Second symbol item _two _stock _language Subtract _length first _country alarm
    multiply search _sum _remember _text First _receives current Name _favorite Uppercase _result place status _it
    _current _my _not _place send Good Spell Current ticker _live _I _The _have _works Get Multiply id _capitals
    _only job text _on _do _What _large Which result _now Multiplies _can _How Arrange _does Tell _stopped _tokens
    Return extract stock Order _sort _this create _streams _afternoon _long _person _there _waited Symbol Turn
    _was product _Reverse _survive Be _title _Ask update _at body _where Status _lost _search Searches Capital
    _nice And Add _people Convert Search add _like Can _next Capitalize how query _meeting Now Give _repository
    _share _age lookup _job _core _trained _killed Sends Who Send _up
    """.split()
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
    return _TEMPLATE.render(messages=messages, tools=example.tools or None)


def render_prompt(example: Example) -> str:
    """The conversation up to where the answer starts."""
    return _TEMPLATE.render(messages=example.messages, tools=example.tools or None, add_generation_prompt=True)


def _make_template() -> Template:
    """Compiled the way transformers does it."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(CHAT_TEMPLATE)


_TEMPLATE = _make_template()


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
    words = list(FREQUENT_WORDS)
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
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
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
