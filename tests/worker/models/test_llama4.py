"""Only in Llama 4: chunked attention beside layers that attend to everything, and a model that also reads images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.models.checkpoints import NATIVE, VOCAB, make_model, prompts, save
from tests.worker.models.conftest import Loaded, Saved
from tests.worker.models.harness import Harness, logits_of
from tests.worker.models.test_oracle import BF16_MEAN, BF16_MOST, MOSTLY
from transformers import AutoConfig, Llama4ForConditionalGeneration

from pagoda_worker.checkpoints.checkpoint import CheckpointError
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading.model import LoadedModel, load_model
from pagoda_worker.models.decoder import Decoder

CHUNK = 32
LENGTHS = [1, CHUNK - 1, CHUNK, 3 * CHUNK + 1, 300]
EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip


def of_lengths() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def test_rows_of_all_lengths_and_many_chunks_are_those_of_transformers(saved: Saved, loaded: Loaded) -> None:
    model, _ = saved("llama4")
    found = Harness(loaded("llama4")).greedy(of_lengths(), CHUNK + 4, chunk=45)
    for prompt, continuation in zip(of_lengths(), found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + continuation[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == continuation


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    if not LIBRARY.exists():
        pytest.skip("no C++ compiler here; the torch back end serves")
    path = save(make_model(*NATIVE["llama4"]), tmp_path_factory.mktemp("llama4"), torch.bfloat16)
    return load_model(WorkerConfig(model=str(path), kernels="native", max_tokens_per_step=1024))


def test_native_log_probabilities_are_close(native: LoadedModel, saved: Saved) -> None:
    """Within the bounds for any family on torch; see `test_oracle`."""
    tokens = of_lengths()[-1]
    with torch.no_grad():
        expected = saved("llama4")[0](input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    difference = (logits_of(native, tokens, [len(tokens)]).log_softmax(-1) - expected).abs()
    difference = difference[difference.amax(-1).argsort()[: round(MOSTLY * len(tokens))]]
    assert difference.mean() < BF16_MEAN
    assert difference.max() < BF16_MOST
    assert isinstance(native.model, Decoder), "its steps cannot be recorded: rows differ between its layers"


@pytest.mark.parametrize("chunks", [[1], [16], [37, 1, 1, 5, 200]])
def test_native_bits_do_not_depend_on_chunks(native: LoadedModel, chunks: list[int]) -> None:
    tokens = of_lengths()[-1]
    assert torch.equal(logits_of(native, tokens, chunks), logits_of(native, tokens, [10**6]))


def with_eyes(path: Path) -> Any:
    """A multimodal checkpoint whose text model is that of `make_model`."""
    text = make_model(*NATIVE["llama4"])
    config = AutoConfig.for_model("llama4", text_config=text.config.to_dict(), vision_config=EYES)
    model = Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(text.state_dict())
    save(model, path)
    return text


def test_the_text_model_of_one_that_sees(tmp_path: Path, loaded: Loaded) -> None:
    with_eyes(tmp_path)
    seeing = load_model(WorkerConfig(model=str(tmp_path), dtype="float32", kernels="torch", fallback=False))
    tokens = prompts()[-1]
    assert torch.equal(logits_of(seeing, tokens, [40]), logits_of(loaded("llama4"), tokens, [40]))
    assert seeing.max_model_len == 1024
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"]["num_hidden_layers"] = 3
    fields["text_config"] |= dict.fromkeys(("no_rope_layers", "layer_types", "moe_layers"))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: language_model\.model\.layers\.3"):
        load_model(WorkerConfig(model=str(tmp_path), dtype="float32", kernels="torch", fallback=False))
