"""A job is run by whoever needs it, charged, and logged when it is over; nothing else of the gateway starts a run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from pagoda_gateway.context import GatewayContext
from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.requests import named_as_in_body
from pagoda_gateway.generation.run import Outcome, Run, Through
from pagoda_gateway.keys.charge import Charge
from pagoda_proto.records import Usage

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    ctx: GatewayContext, job: Job, client: str, charge: Charge, through: Through = lambda taker: taker
) -> AsyncIterator[Run]:
    """`client` is for the log; `through` as in `Run.start`. Raises PagodaError where no engine core takes it."""
    model = ctx.catalogue.of_job(job.model, job.adapter)

    def on_end(usage: Usage, outcome: Outcome) -> None:
        charge.end(usage)
        logger.debug("%s for %s: %s, %s", job.id, client, outcome, usage)

    async with aclosing(Run(job, model.text, on_end)) as run:
        charge.begin(run.usage)
        with named_as_in_body({"grammar": job.shown.form_field}):
            await run.start(model.engine, through)
        charge.taken()
        yield run
