"""Which drafter a worker has, by its options and by what its kernels promise."""

from __future__ import annotations

from dataclasses import replace

from pagoda_worker.checkpoints.checkpoint import Progress
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.speculation.drafting import MAX_DRAFTS, Drafter, DraftModel, NoDrafts, PromptLookup
from pagoda_worker.speculation.forced import ForcedDrafts
from pagoda_worker.speculation.suffixes import SuffixLookup


def check_invariant(target: LoadedModel) -> None:
    """Raises ValueError when a token's bits may depend on what is computed beside it: drafts might change tokens."""
    if not target.batch_invariant:
        raise ValueError("speculation needs kernels whose results do not depend on the batch; these may")


def load_draft_model(config: WorkerConfig, target: LoadedModel, progress: Progress | None = None) -> LoadedModel | None:
    """The draft model, if there is to be one.

    Raises:
        ValueError: it cannot be loaded, or does not go with the target; the message begins with `draft_model`.
    """
    if not config.draft_model:
        return None
    try:
        plain = replace(config, model=config.draft_model, lora_modules="", lora_dir="")
        plain = replace(plain, max_model_len=target.max_model_len)
        draft = load_model(plain, progress, head_size=config.draft_vocab_size or None)
    except ValueError as error:
        raise ValueError(f"draft_model {config.draft_model}: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft_model {config.draft_model}: its vocabulary has {draft.vocab_size} tokens, "
            f"that of the model {target.vocab_size}"
        )
    return draft


def make_drafter(config: WorkerConfig, target: LoadedModel, draft: LoadedModel | None, num_blocks: int) -> Drafter:
    """The drafter that `config` names, and before it what grammars force, where drafts change no token; `draft` is what
    `load_draft_model` returned."""
    named = _named(config, draft, num_blocks)
    return ForcedDrafts(named, config.max_rows) if target.batch_invariant else named


def _named(config: WorkerConfig, draft: LoadedModel | None, num_blocks: int) -> Drafter:
    max_drafts = config.max_drafts or MAX_DRAFTS
    if draft is not None:
        return DraftModel(draft, num_blocks, config, max_drafts)
    if config.speculation == "suffix":
        return SuffixLookup(max_drafts)
    return PromptLookup(max_drafts) if config.speculation else NoDrafts()
