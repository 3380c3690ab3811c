"""Runs a job for any caller, charges it, and logs its end; nothing else in the gateway starts a run.

If transcripts are kept, each finished run leaves one, whoever read it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec

from pagoda_gateway.clients import tenant_of
from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.requests import named_as_in_body
from pagoda_gateway.generation.run import Outcome, Run, Through
from pagoda_gateway.generation.transcripts import Outcomes, Transcript, part_of, transcript_of
from pagoda_gateway.keys.charge import Charge
from pagoda_proto.records import Usage

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    ctx: GatewayContext,
    job: Job,
    client: str,
    charge: Charge,
    through: Through = lambda taker: taker,
    outcomes: Outcomes | None = None,
) -> AsyncIterator[Run]:
    """`client` is for the log; `through` is as in `Run.start`; `outcomes`, if given, collects the updates read.

    Raises:
        PagodaError: no engine core accepts the job.
    """
    model = ctx.catalogue.of_job(job.model, job.adapter)
    outcomes = outcomes or (Outcomes() if ctx.transcripts.wanted else None)

    finished = False

    def on_end(usage: Usage, outcome: Outcome) -> None:
        """Must not refer to the run, which refers to it: the run must be freed with its last reader."""
        nonlocal finished
        finished = outcome is Outcome.FINISHED
        charge.end(usage)
        logger.debug("%s for %s: %s, %s", job.id, client, outcome, usage)

    run = Run(job, model.text, on_end, None if outcomes is None else outcomes.take)
    try:
        async with aclosing(run):
            charge.begin(run.usage)
            with named_as_in_body({"grammar": job.shown.form_field}):
                await run.start(model.engine, through)
            charge.taken()
            yield run
    finally:
        if finished and ctx.transcripts.wanted and outcomes is not None:
            _keep_transcript(ctx, run, outcomes)


def _keep_transcript(ctx: GatewayContext, run: Run, outcomes: Outcomes) -> None:
    transcript = transcribed(run, outcomes)
    if transcript is None:
        logger.warning("no transcript of %s is kept: it would be too large", run.job.id)
        return
    owner = tenant_of(run.job.records[0].cache_salt)
    ctx.transcripts.keep(owner, run.job.id, msgspec.json.encode(transcript))


def transcribed(run: Run, outcomes: Outcomes) -> Transcript | None:
    """The transcript of a run that has finished and was read to its end; None if it exceeds a transcript's limit."""
    if outcomes.too_many:
        return None
    parts = [
        part_of(part.record, part.begun, [outcomes.choice(each.index) for each in part.choices], part.prompt_logprobs)
        for part in run.parts
        if part.begun is not None
    ]
    return transcript_of(run.job, parts) if len(parts) == len(run.parts) else None
