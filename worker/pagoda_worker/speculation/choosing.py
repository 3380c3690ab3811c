"""Which drafter a worker uses, given its options and the guarantees of its kernels."""

from __future__ import annotations

from dataclasses import replace

from pagoda_worker.checkpoints.checkpoint import Progress
from pagoda_worker.config import WorkerConfig
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.speculation.drafting import MAX_DRAFTS, Drafter, DraftModel, NoDrafts
from pagoda_worker.speculation.forced import ForcedDrafts
from pagoda_worker.speculation.suffixes import SuffixLookup


def check_invariant(target: LoadedModel) -> None:
    """Raises ValueError if a token's bits may depend on the rest of the batch: drafts might then change tokens."""
    if not target.batch_invariant:
        raise ValueError("speculation is not possible with these kernels: their results may depend on the batch")


def load_draft_model(config: WorkerConfig, target: LoadedModel, progress: Progress | None = None) -> LoadedModel | None:
    """Load the draft model, if one is configured.

    Raises:
        ValueError: it cannot be loaded, or it or `draft_vocab_size` does not match the target; the message begins with
            the option at fault.
    """
    if not config.draft_model:
        return None
    if config.draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size} exceeds the model's vocabulary of {target.vocab_size} tokens"
        )
    try:
        plain = replace(config, model=config.draft_model, lora_modules="", lora_dir="")
        plain = replace(plain, max_model_len=target.max_model_len)
        draft = load_model(plain, progress, head_size=config.draft_vocab_size or None)
    except ValueError as error:
        raise ValueError(f"draft_model {config.draft_model}: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft_model {config.draft_model}: its vocabulary has {draft.vocab_size} tokens, "
            f"but the model's has {target.vocab_size}"
        )
    return draft


def make_drafter(config: WorkerConfig, target: LoadedModel, draft: LoadedModel | None, num_blocks: int) -> Drafter:
    """The drafter that `config` names, preceded by grammar-forced drafts where drafts change no token; `draft` is what
    `load_draft_model` returned."""
    named = _named(config, draft, num_blocks)
    return ForcedDrafts(named, config.max_rows) if target.batch_invariant else named


def _named(config: WorkerConfig, draft: LoadedModel | None, num_blocks: int) -> Drafter:
    max_drafts = config.max_drafts or MAX_DRAFTS
    if draft is not None:
        return DraftModel(draft, num_blocks, config, max_drafts)
    return SuffixLookup(max_drafts) if config.speculation else NoDrafts()
