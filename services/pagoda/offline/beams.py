"""Beam search with a model in this process: an ordinary request whose choices are the sequences found."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.offline.outputs import CompletionOutput, RequestOutput
from pagoda_engine_core.scheduling.beams import score
from pagoda_proto.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: Number of beams, and of sequences returned.
        max_tokens: Maximum number of output tokens of a sequence.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        length_penalty: A sequence's score is the sum of its log-probabilities divided by its length to this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def asked(self) -> SamplingParams:
        """The sampling parameters of the request. Raises InvalidParams."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=0,
        )


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
    """The sequences found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def searched(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """Convert one prompt's output."""
    return BeamSearchOutput([_sequence(output.prompt_token_ids, one, params) for one in output.outputs])


def _sequence(prompt: list[int], output: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
    logprob = output.cumulative_logprob or 0.0
    return BeamSearchSequence(
        tokens=[*prompt, *output.token_ids],
        cum_logprob=logprob,
        score=score(logprob, len(output.token_ids), params.length_penalty),
        text=output.text,
        finish_reason=output.finish_reason or "",
    )
