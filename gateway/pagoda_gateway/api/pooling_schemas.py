"""Request bodies for embedding and scoring models: OpenAI's, vLLM's, Jina's, Cohere's, text-embeddings-inference's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from pagoda_gateway.api.body import Body, Kept, Text, kind_of_prompts
from pagoda_gateway.api.json_body import MAX_VALUES
from pagoda_gateway.api.schemas import Label, Priority, Salt, TokenIds
from pagoda_proto.errors import InvalidParams, Problem
from pagoda_proto.pooling.params import OUTPUTS

Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1)]
Encoding = Literal["float", "base64"]


Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("lists of ids")],
    Discriminator(kind_of_prompts),
]


class Reading(Body):
    """Fields that all of these have."""

    max_values = MAX_VALUES

    model: str | None = Field(None, max_length=512, description="served model name; the only model if absent")
    user: Label | None = Field(None, description="informational")
    truncate_prompt_tokens: Kept | None = Field(
        None, description="keep only so many tokens of each text, the first ones; -1: as many as the model takes"
    )
    priority: Priority = Field(0, description="lower runs earlier, where the policy heeds it")
    cache_salt: Salt | None = Field(None, description="prefixes are shared only within one salt")


class EmbeddingsRequest(Reading):
    """POST /v1/embeddings."""

    input: Input
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="the first so many numbers, for models that have learned it"
    )
    normalize: bool | None = Field(None, description="vectors of length 1; as the model's files say if absent")
    prompt_name: Label | None = Field(None, description="a prompt of the model's files that goes before each text")
    add_special_tokens: bool = True


class PoolingRequest(EmbeddingsRequest):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = Field(
        None, description=f"one of {', '.join(OUTPUTS)}; what the model is for if absent"
    )
    activation: bool | None = Field(None, description="false: scores as they are")


class ClassifyRequest(Reading):
    """POST /classify."""

    input: Input
    activation: bool | None = Field(None, description="false: scores as they are")
    add_special_tokens: bool = True


class ScoreRequest(Reading):
    """POST /score: one text against several, or two lists of equal length in pairs."""

    text_1: Text | Texts
    text_2: Text | Texts
    activation: bool | None = Field(None, description="false: scores as they are")
    instruction: Text | None = Field(None, description="for models that judge by one")

    @model_validator(mode="after")
    def _as_many(self) -> ScoreRequest:
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            message = f"must have one text or as many as text_2 ({len(second)}), got {len(first)}"
            raise InvalidParams([Problem("text_1", message)])
        return self


class Document(Body):
    text: Text


class RerankRequest(Reading):
    """POST /rerank: `documents` as Jina and Cohere have them, or `texts` as text-embeddings-inference has."""

    query: Text
    documents: Annotated[list[Text | Document], Field(fail_fast=True, min_length=1)] | None = None
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = Field(None, description="true if absent, but at /v2/rerank")
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="keep only so many tokens of each document, its first ones, special tokens aside"
    )
    instruction: Text | None = Field(None, description="for models that judge by one")
    texts: Texts | None = None
    raw_scores: bool | None = Field(None, description="with texts: scores as they are")
    return_text: bool | None = Field(None, description="with texts")
    truncate: bool | None = Field(None, description="with texts: keep as many tokens as the model takes")
    truncation_direction: Literal["Right", "right"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise InvalidParams([Problem("documents", "give either documents or texts")])
        theirs = ("raw_scores", "return_text", "truncate", "truncation_direction")
        ours = ("top_n", "return_documents", "max_tokens_per_doc")
        for name in theirs if self.texts is None else ours:
            if getattr(self, name) is not None:
                raise InvalidParams([Problem(name, f"goes with {'texts' if self.texts is None else 'documents'}")])
        if self.truncate_prompt_tokens is not None and self.truncate:
            raise InvalidParams([Problem("truncate", "truncate_prompt_tokens is given, too")])
        return self


class EmbedRequest(Body):
    """POST /embed, as text-embeddings-inference has it."""

    max_values = MAX_VALUES

    inputs: Text | Texts
    normalize: bool = True
    truncate: bool | None = Field(None, description="keep as many tokens as the model takes")
    truncation_direction: Literal["Right", "right", "Left", "left"] | None = None
    prompt_name: Label | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    model: str | None = Field(None, max_length=512)
