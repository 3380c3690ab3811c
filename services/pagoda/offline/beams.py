"""Beam search over a model in this process: each step of all beams of all prompts is one call of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda.offline.outputs import RequestOutput
from pagoda_gateway.generation.beams import BeamSearch, Candidates
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: How many beams are kept, and how many sequences come of it.
        max_tokens: Most output tokens of a sequence.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        length_penalty: A sequence's score is the sum of its log-probabilities over its length to this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence: `tokens` are prompt and output, `text` is the output's; `finish_reason` is "stop" or "length"."""

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """Of one prompt, the best sequence first."""

    sequences: list[BeamSearchSequence]


Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


def search(
    generate: Generate, prompts: Sequence[list[int]], params: BeamSearchParams, text: ModelText
) -> list[BeamSearchOutput]:
    """Raises PagodaError, as `generate` does."""
    ends = frozenset() if params.ignore_eos else frozenset(text.eos_token_ids)
    searches = [BeamSearch(params.beam_width, params.length_penalty, ends, params.max_tokens) for _ in prompts]
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=searches[0].num_candidates if searches else 0)
    while going := [(prompt, one) for prompt, one in zip(prompts, searches, strict=True) if not one.done]:
        inputs = [[*prompt, *beam.token_ids] for prompt, one in going for beam in one.running]
        outputs = iter(generate(inputs, asked))
        for _, one in going:
            one.take([_candidates(next(outputs), one.num_candidates) for _ in one.running])
    return [_output(prompt, one, text) for prompt, one in zip(prompts, searches, strict=True)]


def _candidates(output: RequestOutput, count: int) -> Candidates:
    (found,) = output.outputs[0].logprobs or ({},)
    return [(token, entry.logprob) for token, entry in found.items() if entry.rank <= count]


def _output(prompt: list[int], search: BeamSearch, text: ModelText) -> BeamSearchOutput:
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=[*prompt, *one.beam.token_ids],
                cum_logprob=one.beam.logprob,
                score=one.score,
                text=text.decode(one.beam.token_ids[: -1 if one.at_end else None]),
                finish_reason="stop" if one.at_end else "length",
            )
            for one in search.best
        ]
    )
