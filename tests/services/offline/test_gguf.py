"""The bundled model as a GGUF file, from prompt to text: like the safetensors, or like what its blocks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gguf_files import GgufFile, demo_pairs, demo_tensors, write_demo
from tests.worker.models.gguf_models import demo_parts

from pagoda import LLM, SamplingParams
from pagoda.settings.problems import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
CHATS = [[{"role": "user", "content": text}] for text in ("What is 3 plus 4?", "How are you?", "Sort: pear, fig")]
OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_gib": 0.05, "dtype": "float32"}


def answers(model: str, **options: Any) -> list[tuple[list[int], str, Any]]:
    with LLM(model, **OPTIONS | options) as llm:
        outputs = [output.outputs[0] for output in llm.chat(CHATS, GREEDY, use_tqdm=False)]
        return [(one.token_ids, one.text, one.logprobs) for one in outputs]


@pytest.fixture(scope="module")
def original() -> list[tuple[list[int], str, Any]]:
    return answers("")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_tokens_and_probabilities_are_those_of_the_safetensors_directory(
    kind: str, original: list[Any], tmp_path: Path
) -> None:
    assert answers(str(write_demo(tmp_path / "m.gguf", kind))) == original


def test_a_set_of_parts_is_served_by_its_directory(original: list[Any], tmp_path: Path) -> None:
    demo_parts(tmp_path)
    assert answers(str(tmp_path)) == original


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_whole_numbers_answer_like_the_model_they_were_made_of(kind: str, original: list[Any], tmp_path: Path) -> None:
    """The model knows these answers well enough. Other tests check that the levels are exactly the file's."""
    found = answers(str(write_demo(tmp_path / "m.gguf", kind)))
    assert [text for _, text, _ in found[:2]] == [text for _, text, _ in original[:2]]
    assert [logprobs for _, _, logprobs in found] != [logprobs for _, _, logprobs in original]


def test_matrices_of_several_kinds_are_served_together(original: list[Any], tmp_path: Path) -> None:
    """As in Q4_K_M files, where values have more bits than the queries and keys that they are computed with."""
    wider = {name: tensor for name, tensor in demo_tensors("Q8_0").items() if "attn_v" in name or "token_embd" in name}
    path = GgufFile(demo_pairs(), demo_tensors("Q4_K") | wider).write(tmp_path / "m.gguf")
    for dtype in ("float32", "bfloat16"):
        found = answers(str(path), dtype=dtype)
        assert [text for _, text, _ in found[:2]] == [text for _, text, _ in original[:2]]


def test_a_form_holds_over_the_vocabulary_of_the_file(tmp_path: Path) -> None:
    """The grammar applies to the tokens that the file lists."""
    with LLM(str(write_demo(tmp_path / "m.gguf", "BF16")), **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, grammar='%llguidance {}\nstart: "red" | "green"')
        (output,) = llm.chat(CHATS[:1], params, use_tqdm=False)
    assert output.outputs[0].text in ("red", "green")


def test_options_hold_for_a_file_as_for_a_directory(original: list[Any], tmp_path: Path) -> None:
    assert answers(str(write_demo(tmp_path / "m.gguf", "F32")), quantization="int8")[0][1] == original[0][1]
    for kind, bits in (("Q8_0", 8), ("Q4_0", 4)):
        path = write_demo(tmp_path / f"{kind}.gguf", kind)
        with pytest.raises(ConfigError, match=rf"quantised already \(gguf: int{bits} group 32, activations int8\)"):
            answers(str(path), quantization="int4")


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"m\.gguf: the file ends within its header"):
        answers(str(tmp_path / "m.gguf"))
