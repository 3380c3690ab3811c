"""The text side of embedding and scoring models: texts and pairs to tokens, and their files' prompts and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from pagoda_gateway.text.special import SpecialTokens
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.pooling.kinds import CLASSIFY, GENERATE, architecture_of
from pagoda_proto.pooling.late import MARKER_AT, Late, Marks, late_of, marks_of
from pagoda_proto.pooling.params import MAX_SIM, TOKEN_EMBED

MAX_LABELS = 100_000
MAX_PROMPTS = 1024
QUERY, DOCUMENT = "query", "document"
ROLES = (DOCUMENT, QUERY)


class Tokens(NamedTuple):
    """`second_start`: where the second text of a pair begins, for models that distinguish them; else 0. `unseen`: see
    `PoolingParams`."""

    token_ids: list[int]
    second_start: int = 0
    unseen: int = 0


@dataclass(frozen=True)
class Template:
    """How a pair is presented to a model that answers yes or no."""

    before: str
    pair: str  # of instruction, query, document
    after: str
    instruction: str


# As its authors give it: the score is the likelihood of the answer that would follow.
QWEN3_RERANKER = Template(
    before=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    pair="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)


class Marked(NamedTuple):
    """`unseen`: number of tokens at its end that no token attends to."""

    token_ids: list[int]
    unseen: int


# Dimensions that the files do not state: any in Qwen3-Embedding, these in EmbeddingGemma.
LEARNED: Mapping[str, tuple[int, ...]] = {"Qwen3ForCausalLM": (), "Gemma3TextModel": (128, 256, 512)}


@dataclass(frozen=True)
class LateText:
    """How texts for late interaction are marked, and queries padded; see `pagoda_proto.pooling.late`."""

    files: Late
    marks: Marks
    mask: int

    def query(self, token_ids: Sequence[int]) -> Marked:
        """Mark and pad a query. `token_ids` include special tokens, as the tokenizer gives them."""
        marked = _marked(token_ids, self.marks.query)
        missing = max(0, self.files.filled - len(marked))
        return Marked(marked + [self.mask] * missing, 0 if self.files.seen else missing)

    def document(self, token_ids: Sequence[int]) -> Marked:
        return Marked(_marked(token_ids, self.marks.document), 0)

    def check_role(self, name: str | None) -> None:
        """Raises InvalidParams."""
        if name is not None and name not in ROLES:
            raise InvalidParams([Problem("prompt_name", f"this model has {', '.join(ROLES)}, not {name[:64]!a}")])


def _marked(token_ids: Sequence[int], marker: int) -> list[int]:
    return [*token_ids[:MARKER_AT], marker, *token_ids[MARKER_AT:]]


@dataclass(frozen=True, kw_only=True)
class ReadingText:
    """What a model is for, and what its files say about reading.

    Attributes:
        kind: See `pagoda_proto.pooling.kinds`.
        width: Approximate length of a vector: a hint for the size of an answer.
        prompts: Texts to put before inputs, by name; `default_prompt` names the one used by default.
        dimensions: Those a request may ask for: None, none; empty, any.
        labels: Of the model's scores.
        template: How pairs are presented; None for two texts side by side.
        late: Only for a model of late interaction.
    """

    kind: str = GENERATE
    width: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    template: Template | None = None
    late: LateText | None = None

    @property
    def output(self) -> str:
        """Its default output for a text."""
        return self.kind if self.late is None else TOKEN_EMBED

    @property
    def of_pairs(self) -> str:
        """Its output for two texts at once; "" if it reads each alone."""
        return MAX_SIM if self.late is not None else CLASSIFY if self.kind == CLASSIFY else ""


def late_text(
    tokenizer: Tokenizer,
    mask_token: str,
    config: Mapping[str, Any],
    modules: Sequence[Any],
    sentence: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> LateText | None:
    """None for a model of another kind. Raises ValueError for files that do not match."""
    late = late_of(config, modules, sentence, metadata)
    if late is None:
        return None
    mask = tokenizer.token_to_id(mask_token)
    if mask is None and late.filled:
        raise ValueError(f"tokenizer.json has no token {mask_token!a}, which queries are filled up with")
    return LateText(late, marks_of(late, tokenizer.token_to_id), mask or 0)


def read_files(
    kind: str, config: Mapping[str, Any], sentence: Mapping[str, Any], *, yes_no: bool, late: LateText | None = None
) -> ReadingText:
    """`config` is config.json, `sentence` config_sentence_transformers.json."""
    prompts = sentence.get("prompts")
    kept = prompts if isinstance(prompts, dict) and len(prompts) <= MAX_PROMPTS else {}
    default = sentence.get("default_prompt_name")
    width = config.get("hidden_size") or config.get("dim") or config.get("n_embd") or 0
    if late is not None:
        width = late.files.width or width
    return ReadingText(
        kind=kind,
        width=width if isinstance(width, int) else 0,
        prompts={str(name): text for name, text in kept.items() if isinstance(text, str)},
        default_prompt=default if isinstance(default, str) and default in kept and late is None else "",
        dimensions=_dimensions(config),
        labels=("yes",) if yes_no else _labels(config),
        template=QWEN3_RERANKER if yes_no else None,
        late=late,
    )


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list) and all(isinstance(one, int) for one in given):
        return tuple(given)
    return () if config.get("is_matryoshka") is True else LEARNED.get(architecture_of(config))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named, count = config.get("id2label"), config.get("num_labels")
    if isinstance(named, dict) and len(named) <= MAX_LABELS:
        return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(len(named)))
    count = count if isinstance(count, int) and 0 < count <= MAX_LABELS else 2
    return tuple(f"LABEL_{i}" for i in range(count))


Pair = tuple[str, str]


def tokens_of(  # noqa: PLR0913 - what a request may say
    own: ReadingText,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    given: str | Pair,
    *,
    keep: int | None = None,
    left: bool = False,
    add_special: bool = True,
    instruction: str | None = None,
    role: str | None = None,
    room: int = 0,
) -> Tokens:
    """Tokens of a text, or of a pair in this model's form; see `encode`. `role` and `room` are for late interaction:
    query or document, and how many tokens a pair may have."""
    if own.late is not None and add_special:
        return _late(own.late, tokenizer, given, keep, left=left, role=role, room=room)
    if isinstance(given, str):
        return encode(tokenizer, given, None, keep=keep, left=left, special=add_special)
    if own.template is None:
        return encode(tokenizer, *given, keep=keep, left=left, special=add_special)
    asked = own.template.instruction if instruction is None else instruction
    return templated(tokenizer, special, own.template, (asked, *given), keep)


def _late(  # noqa: PLR0913 - as above
    late: LateText,
    tokenizer: Tokenizer,
    given: str | Pair,
    keep: int | None,
    *,
    left: bool,
    role: str | None,
    room: int,
) -> Tokens:
    """Each text with its marker; in a truncated pair, the document gets the room that the query leaves."""

    def read(text: str, keep: int | None) -> list[int]:
        return encode(tokenizer, text, None, keep=None if keep is None else keep - 1, left=left).token_ids

    if isinstance(given, str):
        found = late.query(read(given, keep)) if role == QUERY else late.document(read(given, keep))
        return Tokens(found.token_ids, 0, found.unseen)
    query = late.query(read(given[0], keep))
    start = len(query.token_ids)
    document = late.document(read(given[1], None if keep is None else min(keep, room - start)))
    return Tokens(query.token_ids + document.token_ids, start, query.unseen)


def encode(
    tokenizer: Tokenizer, first: str, second: str | None, *, keep: int | None, left: bool = False, special: bool = True
) -> Tokens:
    """Tokens of a text, or of a pair as the tokenizer combines them.

    `keep` is the most tokens: texts are cut at their ends, with `left` at their beginnings, the longer one of a pair
    first; special tokens stay.
    """
    texts = [first] if second is None else [first, second]
    parts = tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # no offsets, which take as long as the rest
    if keep is not None:
        room = max(0, keep - (tokenizer.num_special_tokens_to_add(second is not None) if special else 0))
        for part, length in zip(parts, _lengths([len(part.ids) for part in parts], room), strict=True):
            part.truncate(length, direction="left" if left else "right")
    other = parts[1] if second is not None else None
    whole: Encoding = tokenizer.post_process(parts[0], other, add_special_tokens=special)
    return Tokens(whole.ids, whole.type_ids.index(1) if second is not None and 1 in whole.type_ids else 0)


def _lengths(lengths: list[int], room: int) -> list[int]:
    """Lengths at which all texts fit: the longer one is cut first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(min(lengths), room // 2)
    at = lengths.index(min(lengths))
    return [shorter if i == at else room - shorter for i in range(2)]


def templated(
    tokenizer: Tokenizer, special: SpecialTokens, template: Template, texts: tuple[str, str, str], keep: int | None
) -> Tokens:
    """Tokens of instruction, query and document in `template`; special tokens spelled out in them are plain text. With
    `keep`, the document is cut at its end."""
    around = tokenizer.encode_batch_fast([template.before, template.after], add_special_tokens=False)
    before, after = (part.ids for part in around)
    instruction, query, document = texts
    pair = template.pair.format(instruction=instruction, query=query, document=document)
    middle = special.encode(special.marked(pair))
    if keep is not None:
        middle = middle[: max(0, keep - len(before) - len(after))]
    return Tokens([*before, *middle, *after])
