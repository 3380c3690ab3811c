"""A short engine core that does to rows whatever the real one may: chunks, forks, preemption, moved blocks, steps
planned before the previous step's tokens are known."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import AppendBlocks, Chunk, NewRow, ReplaceBlock, StepPlan, StepResult
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Choice:
    """`row_id` is -1 while it waits; `known` counts tokens, including promised ones, `computed` the planned ones."""

    prompt: list[int]
    outputs: int  # how many to generate
    params: SamplingParams
    choice: int = 0
    adapter: Adapter | None = None
    tokens: list[int] = field(default_factory=list)
    row_id: int = -1
    known: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.known == len(self.prompt) + self.outputs


@dataclass
class Engine:
    """Launches `ahead` steps before it collects the oldest; `chaos` is the probability of each mishap per step."""

    runner: ModelRunner
    choices: list[Choice]
    rng: random.Random
    ahead: int = 0
    chaos: float = 0.0
    chunk_tokens: int = 10**6
    errors: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        facts = self.runner.facts
        self._block_size, self._max_rows = facts.block_size, facts.max_rows
        self._free = self.rng.sample(range(facts.num_blocks), facts.num_blocks)
        self._pending: deque[Pending] = deque()
        self._of_row: dict[int, Choice] = {}
        self._next_row, self._steps = 1, 0

    def run(self) -> list[list[int]]:
        """Run to the end and return the output tokens of every choice."""
        while any(len(one.tokens) < one.outputs for one in self.choices):
            self._pending.append(self.runner.launch(self._plan()))
            while len(self._pending) > self.ahead:
                self._take(self.runner.collect(self._pending.popleft()))
        while self._pending:
            self._take(self.runner.collect(self._pending.popleft()))
        return [one.tokens for one in self.choices]

    def _take(self, result: StepResult) -> None:
        self.errors += [error.message for error in result.errors]
        for output in result.outputs:
            if output.row_id in self._of_row:  # else it was preempted, and this token will be computed again
                self._of_row[output.row_id].tokens += output.token_ids

    def _plan(self) -> StepPlan:
        self._steps += 1
        plan = StepPlan(step=self._steps)
        running = [one for one in self.choices if one.row_id >= 0]
        for one in running:
            if one.done and len(one.tokens) == one.outputs:
                plan.finished_rows.append(self._leave(one))
            elif self.rng.random() < self.chaos:
                plan.finished_rows.append(self._leave(one))
                self.events["preempted"] += 1
        waiting = [one for one in self.choices if one.row_id < 0 and len(one.tokens) < one.outputs]
        for one in waiting[: self.rng.randrange(1, 3) if self.chaos else len(waiting)]:
            if len(self._of_row) < self._max_rows:
                plan.new_rows.append(self._enter(one, plan))
        running = list(self._of_row.values())
        for one in self.rng.sample(running, len(running)) if self.chaos else running:
            if not one.done and self.rng.random() >= self.chaos:
                self._compute(one, plan)
        return plan

    def _leave(self, one: Choice) -> int:
        shared = {block for other in self._of_row.values() if other is not one for block in other.blocks}
        self._free += [block for block in one.blocks if block not in shared]
        row_id, one.row_id, one.blocks = one.row_id, -1, []
        del self._of_row[row_id]
        return row_id

    def _enter(self, one: Choice, plan: StepPlan) -> NewRow:
        """Start a row, with the blocks of a choice of the same prompt if one has computed it; copy the last of them."""
        one.row_id, self._next_row = self._next_row, self._next_row + 1
        tokens = one.prompt + one.tokens
        one.known, one.computed = len(tokens), 0
        for other in self._of_row.values():
            if other.prompt is one.prompt and other.computed >= len(one.prompt):
                one.computed = len(one.prompt) - 1
                last = one.computed // self._block_size
                one.blocks = other.blocks[: last + 1]
                shared, copied = list(one.blocks), self._free.pop(0)
                plan.block_copies.append((one.blocks[last], copied))
                plan.replace_blocks.append(ReplaceBlock(one.row_id, last, copied))
                one.blocks[last] = copied
                self.events["forked"] += 1
                break
        else:
            shared = []
        self._of_row[one.row_id] = one
        return NewRow(
            row_id=one.row_id, token_ids=tokens, num_prompt_tokens=len(one.prompt), num_computed=one.computed,
            block_ids=shared, params=one.params, seed=7, choice=one.choice, adapter=one.adapter,
        )  # fmt: skip

    def _compute(self, one: Choice, plan: StepPlan) -> None:
        count = min(self.chunk_tokens, one.known - one.computed)
        missing = -(-(one.computed + count) // self._block_size) - len(one.blocks)
        if missing > 0:
            more = [self._free.pop(0) for _ in range(missing)]
            plan.append_blocks.append(AppendBlocks(one.row_id, more))
            one.blocks += more
        elif self.rng.random() < self.chaos and one.row_id not in {new.row_id for new in plan.new_rows}:
            index = one.computed // self._block_size  # as if it were shared: the row writes to a copy
            copied, old = self._free.pop(0), one.blocks[index]
            if all(old not in other.blocks for other in self._of_row.values() if other is not one):
                self._free.append(old)
            plan.block_copies.append((old, copied))
            plan.replace_blocks.append(ReplaceBlock(one.row_id, index, copied))
            one.blocks[index] = copied
            self.events["moved"] += 1
        sample = one.computed + count == one.known
        plan.chunks.append(Chunk(one.row_id, one.computed, count, sample))
        one.computed += count
        one.known += sample
