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
    pair: str  # of instruction, query and, at its end, document
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
    """`config` is config.json, `sentence` config_sentence_transformers.json. Raises ValueError if its default prompt is
    none of its prompts."""
    prompts = sentence.get("prompts")
    kept = prompts if isinstance(prompts, dict) and len(prompts) <= MAX_PROMPTS else {}
    default = sentence.get("default_prompt_name")
    if default is not None and late is None and not (isinstance(default, str) and default in kept):
        raise ValueError(f"config_sentence_transformers.json: 'default_prompt_name' {str(default)[:64]!a} is no prompt")
    width = config.get("hidden_size") or config.get("dim") or config.get("n_embd") or 0
    if late is not None:
        width = late.files.width or width
    return ReadingText(
        kind=kind,
        width=width if isinstance(width, int) else 0,
        prompts={str(name): text for name, text in kept.items() if isinstance(text, str)},
        default_prompt=default if isinstance(default, str) and late is None else "",
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


class Cut(NamedTuple):
    """How much is kept of texts: at most `keep` tokens with all special ones, and at most `document` of the last text's
    own. Texts are cut at their ends, with `left` at their beginnings."""

    keep: int | None = None
    left: bool = False
    document: int | None = None


WHOLE = Cut()


class NoRoom(ValueError):
    """A cut would leave nothing of a text. `least`: the smallest `keep` that leaves a token of each."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens are needed")
        self.least = least


def tokens_of(  # noqa: PLR0913 - what a request may say
    own: ReadingText,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    given: str | Pair,
    cut: Cut = WHOLE,
    *,
    prompt: str = "",
    add_special: bool = True,
    instruction: str | None = None,
    role: str | None = None,
    room: int = 0,
) -> Tokens:
    """Tokens of a text after its `prompt`, or of a pair in this model's form; see `encode`. `role` and `room` are for
    late interaction: query or document, and how many tokens a pair may have. Raises NoRoom."""
    if own.late is not None and add_special:
        return _late(own.late, tokenizer, given, cut, role=role, room=room)
    if isinstance(given, str):
        return encode(tokenizer, given, None, cut, special=add_special, prompt=prompt)
    if own.template is None:
        return encode(tokenizer, *given, cut, special=add_special)
    asked = own.template.instruction if instruction is None else instruction
    return templated(tokenizer, special, own.template, (asked, *given), cut)


def _late(late: LateText, tokenizer: Tokenizer, given: str | Pair, cut: Cut, *, role: str | None, room: int) -> Tokens:
    """Each text with its marker; in a truncated pair, the document gets the room that the query leaves."""

    def read(text: str, cut: Cut) -> list[int]:
        return encode(tokenizer, text, None, cut, beside=1).token_ids

    if isinstance(given, str):
        found = late.query(read(given, cut)) if role == QUERY else late.document(read(given, cut))
        return Tokens(found.token_ids, 0, found.unseen)
    query = late.query(read(given[0], cut._replace(document=None)))
    start = len(query.token_ids)
    left = None if cut.keep is None else min(cut.keep, room - start)
    try:
        document = late.document(read(given[1], cut._replace(keep=left)))
    except NoRoom as error:
        raise NoRoom(error.least if left == cut.keep else start + error.least) from error
    return Tokens(query.token_ids + document.token_ids, start, query.unseen)


def encode(  # noqa: PLR0913 - as above
    tokenizer: Tokenizer,
    first: str,
    second: str | None,
    cut: Cut = WHOLE,
    *,
    special: bool = True,
    prompt: str = "",
    beside: int = 0,
) -> Tokens:
    """Tokens of a text after its `prompt`, or of a pair as the tokenizer combines them.

    The longer one of a pair is cut first; special tokens and `beside` more that the caller adds stay. Raises NoRoom.
    """
    texts = [prompt + first] if second is None else [first, second]
    parts = tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # no offsets, which take as long as the rest
    if cut != WHOLE:
        added = beside + (tokenizer.num_special_tokens_to_add(second is not None) if special else 0)
        before = [] if cut.left or not prompt else tokenizer.encode(prompt, add_special_tokens=False).ids
        leading = _num_shared(before, parts[0].ids)
        for part, length in zip(parts, _kept([len(part.ids) for part in parts], cut, added, leading), strict=True):
            part.truncate(length, direction="left" if cut.left else "right")
    other = parts[1] if second is not None else None
    whole: Encoding = tokenizer.post_process(parts[0], other, add_special_tokens=special)
    return Tokens(whole.ids, whole.type_ids.index(1) if second is not None and 1 in whole.type_ids else 0)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning: the tokens of a text's beginning, but for a last one that goes on beyond it."""
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


def _kept(lengths: list[int], cut: Cut, added: int, leading: int) -> list[int]:
    """How many tokens each text keeps, beside `added` ones; the first `leading` ones precede the text itself. Raises
    NoRoom."""
    if cut.document is not None:
        lengths = [*lengths[:-1], min(lengths[-1], cut.document + (leading if len(lengths) == 1 else 0))]
    if cut.keep is None:
        return lengths
    kept = _lengths(lengths, max(0, cut.keep - added))
    if added > cut.keep or any(now < before and now <= leading for before, now in zip(lengths, kept, strict=True)):
        raise NoRoom(added + leading + len(lengths))
    return kept


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
    tokenizer: Tokenizer,
    special: SpecialTokens,
    template: Template,
    texts: tuple[str, str, str],
    cut: Cut = WHOLE,
) -> Tokens:
    """Tokens of instruction, query and document in `template`; special tokens spelled out in them are plain text. Only
    the document is cut, at its end. Raises NoRoom."""
    around = tokenizer.encode_batch_fast([template.before, template.after], add_special_tokens=False)
    before, after = (part.ids for part in around)
    instruction, query, document = texts
    opening = template.pair.format(instruction=instruction, query=query, document="")
    middle = special.encode(special.marked(opening + document))
    if cut != WHOLE:
        leading = _num_shared(special.encode(special.marked(opening)), middle)
        (length,) = _kept([len(middle)], cut, len(before) + len(after), leading)
        middle = middle[:length]
    return Tokens([*before, *middle, *after])
