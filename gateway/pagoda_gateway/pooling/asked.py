"""What one request asks of a model that reads, checked against the model: the same over HTTP and offline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.reading import Cut, NoRoom, Pair, ReadingText, Tokens, encode, tokens_of
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.params import ModelLimits
from pagoda_proto.pooling.kinds import CLASSIFY
from pagoda_proto.pooling.params import PoolingParams


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The fields of a body besides its texts.

    Attributes:
        param: The body's name for the texts; of pairs, for the second ones.
        first_param: Its name for the first ones of pairs; `keep_param` and `raw_param`: for `keep` and for raw scores.
        keep: At most this many tokens of each text or pair, -1 for the model's context.
        document: At most this many tokens of each second text alone.
        left: Truncate at the beginning.
        instruction: For models that take one.
    """

    param: str
    pooling: PoolingParams
    first_param: str = ""
    keep_param: str = "truncate_prompt_tokens"
    raw_param: str = "activation"
    keep: int | None = None
    document: int | None = None
    left: bool = False
    special: bool = True
    prompt_name: str | None = None
    instruction: str | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Reading:
    """Turns the texts of one request into tokens and parameters. Make it with `checked`.

    `prompt` precedes each text, and `skip` of its tokens are what mean pooling may leave out.
    """

    text: ModelText
    limits: ModelLimits
    asked: Asked
    keep: int | None
    prompt: str
    skip: int

    @staticmethod
    def checked(text: ModelText, limits: ModelLimits, asked: Asked) -> Reading:
        """Raises InvalidParams if the model lacks something requested."""
        problems = list(_problems(text.reading, limits, asked))
        if problems:
            raise InvalidParams(problems)
        prompt, skip = _prompt(text, asked)
        return Reading(text, limits, asked, limits.max_model_len if asked.keep == -1 else asked.keep, prompt, skip)

    def tokens(self, given: str | Pair, document: int | None = None) -> Tokens:
        """Tokens of a text or a pair; `document`: as in `Cut`. Raises InvalidParams if cutting leaves nothing of it."""
        asked, text = self.asked, self.text
        try:
            return tokens_of(
                text.reading, text.tokenizer, text.special, given, Cut(self.keep, asked.left, document),
                prompt=self.prompt, add_special=asked.special, instruction=asked.instruction, role=asked.prompt_name,
                room=self.limits.max_model_len,
            )  # fmt: skip
        except NoRoom as error:
            message = f"keeps {self.keep} tokens, but {error.least} are needed to leave something of each text"
            raise InvalidParams([Problem(asked.keep_param, message)]) from error

    def ids(self, token_ids: list[int]) -> Tokens:
        """An input that is token ids already. Raises InvalidParams."""
        if self.asked.prompt_name is not None:
            raise InvalidParams([Problem("prompt_name", f"goes before texts, but {self.asked.param} has token ids")])
        return Tokens(token_ids[: self.keep])

    def params(self, given: str | Pair | list[int], tokens: Tokens) -> PoolingParams:
        """The parameters of an input with these tokens."""
        own = self.asked.pooling
        skip = self.skip if isinstance(given, str) and self.skip < len(tokens.token_ids) else 0
        return replace(
            own,
            second_start=tokens.second_start or own.second_start,
            unseen=tokens.unseen or own.unseen,
            skip=skip or own.skip,
        )


def _problems(own: ReadingText, limits: ModelLimits, asked: Asked) -> Iterator[Problem]:
    keep = asked.keep
    if keep is not None and (keep < -1 or keep == 0):
        yield Problem(asked.keep_param, f"must be -1 or at least 1, got {keep}")
    elif keep is not None and keep > limits.max_model_len:
        yield Problem(asked.keep_param, f"must be at most {limits.max_model_len}, this model's context, got {keep}")
    wanted, known = asked.pooling.dimensions, own.dimensions
    if wanted and known is None:
        yield Problem("dimensions", "this model was not trained for shorter vectors")
    elif wanted and known and wanted not in known:
        yield Problem("dimensions", f"this model has {', '.join(map(str, known))}, not {wanted}")
    if asked.instruction is not None and own.template is None:
        yield Problem("instruction", "this model takes none")
    if own.late is not None and asked.prompt_name is not None and not asked.special:
        yield Problem("prompt_name", "this model marks it with a special token, but add_special_tokens is false")


def _prompt(text: ModelText, asked: Asked) -> tuple[str, int]:
    own, name = text.reading, asked.prompt_name
    if own.late is not None:
        own.late.check_role(name)
        return "", 0
    if name is not None and name not in own.prompts:
        known = ", ".join(sorted(own.prompts)) or "none"
        raise InvalidParams([Problem("prompt_name", f"this model has {known}, not {name[:64]!a}")])
    prompt = own.prompts[name or own.default_prompt] if name or own.default_prompt else ""
    if not prompt or not asked.special:
        return prompt, 0
    return prompt, len(encode(text.tokenizer, prompt, None).token_ids) - 1


def check_scores(own: ReadingText, asked: Asked) -> None:
    """Raises InvalidParams unless the model gives pairs a score as `asked`."""
    if own.kind == CLASSIFY and len(own.labels) != 1:
        message = f"this model has {len(own.labels)} labels, and a score needs one with one label; use classify"
        raise InvalidParams([Problem("model", message)])
    if own.kind != CLASSIFY and asked.pooling.activate is False:
        message = "raw scores need a model with a head for scores; this one makes embeddings"
        raise InvalidParams([Problem(asked.raw_param, message)])
