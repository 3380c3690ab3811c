"""Late interaction offline: matrices and scores equal the formula applied to transformers' hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gateway.model_dir import word_tokenizer
from tests.worker.encoders.checkpoints import save
from tokenizers import AddedToken

from pagoda import LLM, PagodaError
from pagoda.settings.problems import ConfigError

OPTIONS: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
DIM, FILLED = 8, 10
CLS, SEP, A, COLON = 2, 3, 4, 11
MASK, ASKS, TELLS = 14, 15, 16
LENGTH = 1e-12


def tokenizer_with(path: Path, query: str, document: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("[MASK]", query, document)])
    tokenizer.save(str(path / "tokenizer.json"))


def stanford(path: Path, **metadata: Any) -> tuple[Any, torch.Tensor]:
    """A checkpoint as the authors' code saves it: a matrix beside the tensors of `bert.`."""
    model = save(path, "bert")
    tokenizer_with(path, "[unused0]", "[unused1]")
    weight = torch.randn(DIM, 64)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": weight}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "artifact.metadata").write_text(json.dumps({"query_maxlen": FILLED, "dim": DIM} | metadata))
    return model, weight


def pylate(path: Path, **sentence: Any) -> tuple[Any, torch.Tensor]:
    """A checkpoint with a Dense module per token, and no Pooling."""
    model = save(path, "modernbert")
    tokenizer_with(path, "[Q] ", "[D] ")
    weight = torch.randn(DIM, 64)
    (path / "1_Dense").mkdir()
    save_file({"linear.weight": weight}, path / "1_Dense/model.safetensors")
    dense = {"in_features": 64, "out_features": DIM, "bias": False, "activation_function": "torch.nn.Identity"}
    (path / "1_Dense/config.json").write_text(json.dumps(dense))
    kinds = ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")
    modules = [{"idx": i, "name": str(i), "path": folder, "type": kind} for i, (kind, folder) in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "config_sentence_transformers.json").write_text(json.dumps({"query_length": FILLED} | sentence))
    return model, weight


def matrix(made: tuple[Any, torch.Tensor], ids: list[int], seen: int, skipped: tuple[int, ...] = ()) -> torch.Tensor:
    """The vectors of all tokens that are not skipped; only the first `seen` tokens are attended to."""
    model, weight = made
    mask = torch.tensor([[1] * seen + [0] * (len(ids) - seen)])
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    kept = [place for place, token in enumerate(ids) if token not in skipped]
    return torch.nn.functional.normalize((states @ weight.T)[kept], dim=-1, eps=LENGTH)


QUERY_IDS = [CLS, ASKS, A, 5, SEP]
FILLED_IDS = QUERY_IDS + [MASK] * (FILLED - len(QUERY_IDS))
DOCUMENTS = {"a : b dog": [CLS, TELLS, A, COLON, 5, 7, SEP], "cat : c " * 20: [CLS, TELLS, *[8, COLON, 6] * 20, SEP]}


def expected(made: tuple[Any, torch.Tensor], document: str, seen: bool) -> float:
    query = matrix(made, FILLED_IDS, len(FILLED_IDS) if seen else len(QUERY_IDS))
    ids = DOCUMENTS[document]
    return float((query @ matrix(made, ids, len(ids), (COLON,)).T).max(1).values.sum())


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (stanford, False), (lambda path: stanford(path, attend_to_mask_tokens=True), True), (pylate, False),
        (lambda path: pylate(path, attend_to_expansion_tokens=True), True),
    ],
    ids=["stanford", "stanford-seen", "pylate", "pylate-seen"],
)  # fmt: skip
def test_scores_and_matrices_are_those_of_the_formula(make: Any, seen: bool, tmp_path: Path) -> None:
    made = make(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    found = llm.score("a b", list(DOCUMENTS))
    for one, document in zip(found, DOCUMENTS, strict=True):
        assert one.prompt_token_ids == FILLED_IDS + DOCUMENTS[document]
        assert one.outputs.score == pytest.approx(expected(made, document, seen), abs=2e-3)
    assert found[1].outputs.score == llm.score("a b", list(DOCUMENTS)[1])[0].outputs.score
    (whole,) = llm.encode("a : b dog")
    ids = DOCUMENTS["a : b dog"]
    torch.testing.assert_close(
        torch.tensor(whole.outputs.data), matrix(made, ids, len(ids), (COLON,)), rtol=1e-3, atol=1e-3
    )


def test_queries_are_not_filled_and_nothing_is_skipped_where_the_files_say_so(tmp_path: Path) -> None:
    made = pylate(tmp_path, do_query_expansion=False, skiplist_words=[])
    llm = LLM(str(tmp_path), **OPTIONS)
    ids = DOCUMENTS["a : b dog"]
    wanted = (matrix(made, QUERY_IDS, len(QUERY_IDS)) @ matrix(made, ids, len(ids)).T).max(1).values.sum()
    (found,) = llm.score("a b", "a : b dog")
    assert found.prompt_token_ids == QUERY_IDS + ids
    assert found.outputs.score == pytest.approx(float(wanted), abs=2e-3)
    with pytest.raises(PagodaError, match="token_embed and max_sim, not embed"):
        llm.embed("a")
    long = llm.score("a b", "b " * 900, truncate_prompt_tokens=-1)[0]
    assert len(long.prompt_token_ids) == llm.max_model_len


def test_a_query_longer_than_a_window_is_refused_where_its_end_is_unseen(tmp_path: Path) -> None:
    pylate(tmp_path, query_length=12)
    with pytest.raises(
        ConfigError, match="queries padded to 12 unattended tokens are not supported with windows of 11"
    ):
        LLM(str(tmp_path), **OPTIONS)
