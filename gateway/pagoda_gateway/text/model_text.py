"""The text side of a model: everything a checkpoint's tokenizer and configuration files say, without the weights.

The gateway and the offline `LLM` both use it, so they see the same prompts, texts and endings.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from pagoda_gateway.text.answers import Formats
from pagoda_gateway.text.chat import RESERVED, ChatTemplate
from pagoda_gateway.text.conversation import Chat, Message, template_messages, turns_of
from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.reading import LateText, ReadingText, late_text, read_files
from pagoda_gateway.text.special import MARK, SpecialTokens
from pagoda_gateway.text.vocabulary import TokenTable, byte_level_alphabet, read_rules
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError
from pagoda_proto.model_files.files import MAX_TOKENIZER_BYTES, FileTooLarge, model_files
from pagoda_proto.model_files.gguf import BadGguf
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.kinds import (
    AUTO,
    CLASSIFY,
    EMBED,
    GENERATE,
    MODULES,
    TRANSFORMER_FILES,
    is_yes_no_reranker,
    kind_of,
)
from pagoda_proto.pooling.late import METADATA

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 * 1024 * 1024
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class BadModelFiles(ValueError):
    """The model directory cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """Tokenizer, end-of-sequence ids and chat template of one model; immutable, safe to share between threads.

    Attributes:
        vocab_size: Width of the logits in config.json, or the tokenizer's size; a hint until a worker reports.
        max_model_len: Context length in config.json, 0 if it does not say; likewise a hint.
        eos_token_ids: Tokens that end an answer.
        sampling_defaults: The author's defaults from generation_config.json (temperature, top_p, top_k, min_p,
            repetition_penalty); `do_sample: false` reads as temperature 0.
        table: Token id -> bytes.
        templates: Chat templates by name; "default", and "tool_use" if the model has one for tools.
        formats: How the model reasons and calls tools according to its templates.
        reading: What the model is for, and what its files say about reading.
        longest_token_bytes: No token covers more bytes of a text than this; 0 if a token may cover any number.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool | None
    sampling_defaults: Mapping[str, Any]
    table: TokenTable
    templates: Mapping[str, ChatTemplate]
    formats: Formats
    longest_token_bytes: int
    special: SpecialTokens
    reading: ReadingText = field(default_factory=ReadingText)

    @staticmethod
    def load(
        model_dir: Path | str,
        chat_template_override: str = "",
        *,
        task: str = AUTO,
        tool_parser: str = "",
        reasoning_parser: str = "",
    ) -> ModelText:
        """Read tokenizer.json and its neighbours. `chat_template_override` is a template's text; the parsers are names
        of formats, by default recognised from the templates. `task` is what the operator says the model is for.

        Raises:
            BadModelFiles: a file is missing, too large or malformed.
            UnsupportedTokenizer: the decoder has an unknown kind.
            BadTemplate: a chat template is too large or does not compile.
        """
        files = _ModelFiles(Path(model_dir))
        tokenizer, definition = files.tokenizer()
        text = _build(files, tokenizer, definition, chat_template_override, (tool_parser, reasoning_parser))
        return replace(text, reading=_reading(files, tokenizer, task))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Releases the GIL, so long texts belong in a thread.

        Special tokens spelled out in the text become special tokens, as with Hugging Face tokenizers.
        """
        ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._with_bos(ids) if add_special_tokens else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """If tokenizer_config.json decides about the beginning-of-sequence token, it overrides tokenizer.json."""
        has_bos = bool(ids) and ids[0] == self.bos_token_id
        if self.bos_token_id is None or self.add_bos is None or self.add_bos == has_bos:
            return ids
        return [self.bos_token_id, *ids] if self.add_bos else ids[1:]

    def template(self, tools: bool = False) -> ChatTemplate:
        """The template to use. Raises PagodaError if the model has none."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self.templates.get(name)
        if template is None:
            message = "this model has no chat template; use /v1/completions or start with --chat-template"
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "messages")
        return template

    @property
    def template_options(self) -> frozenset[str]:
        """The variables that this model's chat templates read besides messages and tools."""
        return frozenset(name for template in self.templates.values() for name in template.variables) - RESERVED

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Render messages of OpenAI's chat API to the prompt's text; `options` are those of `Chat` and the template's.

        Raises:
            PagodaError: INVALID_ARGUMENT if the template does not take these messages.
        """
        return self.render_marked(_chat(messages, **options)).replace(MARK, "")

    def render_marked(self, chat: Chat) -> str:
        """Render the prompt's text, with marks by which `encode_marked` knows the special tokens that are plain text.

        `chat.options` must have passed `ChatTemplate.check_kwargs` if they come from a request.

        Raises:
            PagodaError: INVALID_ARGUMENT if the template does not take these turns.
        """
        template = self.template(bool(chat.tools))
        return template.render(
            self.special.marked(template_messages(chat.turns, parts=template.reads_parts)),
            tools=self.special.marked(chat.tools) if chat.tools else None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            kwargs=self.special.marked(chat.options),
        )

    def encode_marked(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text from `render_marked`.

        Raises:
            PagodaError: INVALID_ARGUMENT if this tokenizer takes even plain text for a special token.
        """
        if MARK not in text:
            return self.encode(text, add_special_tokens)
        opening = self.encode("") if add_special_tokens else []
        return opening + self.special.encode(text)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of the chat that `render_chat` renders. Only the template writes special tokens: those spelled out
        in a message are plain text.
        """
        return self.encode_marked(self.render_marked(_chat(messages, **options)))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of whole token sequences (the first token opens the text)."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=skip_special_tokens, at_start=True)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes inside a text."""
        return self.table.bytes_of(token_id)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of these words, with and without a leading space."""
        found: list[tuple[int, ...]] = []
        for word in words:
            plain = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            found.append(plain)
            if spaced and spaced != plain:
                found.append(spaced)
        return tuple(found)

    def min_tokens_of(self, num_chars: int) -> int:
        """A lower bound of the tokens of any text of this many characters; 0 if this tokenizer has no such bound."""
        longest = self.longest_token_bytes
        return -(-num_chars // longest) if longest else 0


def _chat(messages: Sequence[Message], tools: Any = None, **options: Any) -> Chat:
    named = {name: options.pop(name) for name in ("add_generation_prompt", "continue_final_message") if name in options}
    return Chat(turns=turns_of(messages), tools=tools or (), options=options, **named)


class _ModelFiles:
    """The files of a model, each read at most once, up to a maximum size."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = model_files(root)
        self.config = self.json_object("config.json")
        self.generation = self.json_object("generation_config.json")
        self.tokenizer_config = self.json_object("tokenizer_config.json")

    def text(self, name: str, max_bytes: int) -> str | None:
        """A file's text, None if there is no such file."""
        try:
            content = self._files.read(name, max_bytes)
            return None if content is None else content.decode()
        except (BadGguf, FileTooLarge) as error:
            raise BadModelFiles(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise BadModelFiles(f"{name}: {error}") from error

    def json_object(self, name: str) -> dict[str, Any]:
        return _json_object(name, self.text(name, MAX_CONFIG_BYTES) or "{}")

    def tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        source = self.text("tokenizer.json", MAX_TOKENIZER_BYTES)
        if source is None:
            raise BadModelFiles(f"no tokenizer.json in model directory {self.root.name!r}")
        definition = _json_object("tokenizer.json", source)
        try:
            tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise BadModelFiles(f"tokenizer.json: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer, definition


def _json_object(name: str, source: str) -> dict[str, Any]:
    """Raises BadModelFiles if `source` is not a JSON object."""
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadModelFiles(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFiles(f"{name}: must hold a JSON object")
    return value


def _build(
    files: _ModelFiles, tokenizer: Tokenizer, definition: dict[str, Any], template: str, parsers: tuple[str, str]
) -> ModelText:
    special = _special_tokens(files.tokenizer_config)
    text_config = files.config.get("text_config", {})
    config = {**text_config, **files.config} if isinstance(text_config, dict) else files.config
    add_bos = files.tokenizer_config.get("add_bos_token")
    templates, tokens = _templates(files, template), SpecialTokens(tokenizer)
    vocab_size = max(_integer(config.get("vocab_size")), tokenizer.get_vocab_size())
    return ModelText(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=_integer(config.get("max_position_embeddings")),
        eos_token_ids=_eos_ids(files, tokenizer, special.get("eos_token"), vocab_size),
        bos_token_id=tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        sampling_defaults=_sampling_defaults(files.generation),
        table=_table(tokenizer, definition),
        templates={name: ChatTemplate(source, special) for name, source in templates.items()},
        formats=Formats.of(templates.get("tool_use", templates.get("default", "")), tokens.ids, *parsers),
        longest_token_bytes=_longest_token_bytes(definition, tokenizer),
        special=tokens,
    )


def _reading(files: _ModelFiles, tokenizer: Tokenizer, task: str) -> ReadingText:
    root = str(files.root)
    kind = kind_of(files.config, root, has_modules=(files.root / MODULES).is_file(), asked=task)
    sentence = files.json_object("config_sentence_transformers.json") if kind != GENERATE else {}
    yes_no = kind == CLASSIFY and is_yes_no_reranker(files.config, root)
    if kind == EMBED and _lowers(files):
        usual = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *usual])
    late = _late(files, tokenizer, sentence) if kind == EMBED else None
    return read_files(kind, files.config, sentence, yes_no=yes_no, late=late)


def _lowers(files: _ModelFiles) -> bool:
    """Whether texts are lower-cased first, whatever the tokenizer's own files say."""
    said = next((fields for name in TRANSFORMER_FILES if (fields := files.json_object(name))), {})
    return said.get("do_lower_case") is True


def _late(files: _ModelFiles, tokenizer: Tokenizer, sentence: Mapping[str, Any]) -> LateText | None:
    mask = _special_tokens(files.tokenizer_config).get("mask_token", "[MASK]")
    try:
        modules = json.loads(files.text(MODULES, MAX_CONFIG_BYTES) or "[]")
        listed = modules if isinstance(modules, list) else []
        return late_text(tokenizer, mask, files.config, listed, sentence, files.json_object(METADATA))
    except (ValueError, RecursionError) as error:
        raise BadModelFiles(f"{files.root.name!r}: {error}") from error


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; older files write them as objects."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(files: _ModelFiles, tokenizer: Tokenizer, eos_token: str | None, vocab_size: int) -> tuple[int, ...]:
    named = files.generation.get("eos_token_id", files.config.get("eos_token_id"))
    ids = [value for value in (named if isinstance(named, list) else [named]) if isinstance(value, int)]
    if none := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
        log.warning("eos_token_id names tokens that the model does not have, which are ignored: %s", none)
        ids = [token_id for token_id in ids if token_id not in none]
    by_name = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    return tuple(dict.fromkeys([*ids, *([by_name] if by_name is not None else [])]))


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """JSON null means not set. Without sampling the other numbers have no meaning."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, Any] = {}
    for name in _SAMPLING_DEFAULTS:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            given: dict[str, Any] = {name: int(value) if name == "top_k" else value}
            try:
                defaults[name] = getattr(SamplingParams(**given), name)
            except InvalidParams as error:
                log.warning("generation_config.json recommends impossible values, which are ignored: %s", error.message)
    return defaults


def _table(tokenizer: Tokenizer, definition: Mapping[str, Any]) -> TokenTable:
    rules = read_rules(definition.get("decoder"))
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    return TokenTable(rules, tokens, special)


def _longest_token_bytes(definition: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Byte-level tokenizers drop nothing, so for them (and only them) a text's size bounds its tokens from below."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    steps = definition.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    whole = (
        definition.get("normalizer") is None
        and any(step.get("type") == "ByteLevel" for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        and all(char in vocab for char in byte_level_alphabet())
    )
    return max(len(piece.encode()) for piece in vocab) if whole else 0


def _templates(files: _ModelFiles, override: str) -> dict[str, str]:
    """Sources by name: the operator's, otherwise chat_template.jinja and its neighbours, then tokenizer_config.json."""
    if override:
        return {"default": override}
    named = files.tokenizer_config.get("chat_template")
    if isinstance(named, str):
        found = {"default": named}
    elif isinstance(named, list):
        found = {str(item["name"]): str(item["template"]) for item in named if isinstance(item, dict)}
    else:
        found = {}
    for name, path in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        source = files.text(path, MAX_CONFIG_BYTES)
        if source is not None:
            found[name] = source
    return {name: found[name] for name in ("default", "tool_use") if name in found}
