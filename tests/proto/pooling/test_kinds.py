from __future__ import annotations

import pytest

from pagoda_proto.pooling.kinds import CLASSIFY, EMBED, GENERATE, is_yes_no_reranker, kind_of


@pytest.mark.parametrize(
    ("architecture", "modules", "kind"),
    [
        ("LlamaForCausalLM", False, GENERATE),
        ("GPT2LMHeadModel", False, GENERATE),
        ("GPT2Model", False, EMBED),
        ("Qwen3ForCausalLM", True, EMBED),
        ("BertModel", False, EMBED),
        ("BertForMaskedLM", False, EMBED),
        ("XLMRobertaForSequenceClassification", False, CLASSIFY),
        ("XLMRobertaForSequenceClassification", True, CLASSIFY),
        ("SomethingElse", False, GENERATE),
    ],
)
def test_a_models_files_tell_what_it_is_for(architecture: str, modules: bool, kind: str) -> None:
    assert kind_of({"architectures": [architecture]}, "/m", has_modules=modules) == kind


def test_what_the_operator_says_wins() -> None:
    assert kind_of({"architectures": ["BertModel"]}, "/m", has_modules=True, asked=GENERATE) == GENERATE


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": [3]}])
def test_files_that_name_nothing_generate(config: dict[str, object]) -> None:
    assert kind_of(config, "/m", has_modules=False) == GENERATE


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/m/Qwen3-Reranker-0.6B", True),
        ("/hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/abc", True),
        ("/m/Qwen3-0.6B", False),
    ],
)
def test_a_reranker_that_answers_yes_or_no_is_known_by_its_name(path: str, found: bool) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"]}
    assert is_yes_no_reranker(config, path) is found
    assert kind_of(config, path, has_modules=False) == (CLASSIFY if found else GENERATE)
    assert not is_yes_no_reranker({"architectures": ["LlamaForCausalLM"]}, path)
