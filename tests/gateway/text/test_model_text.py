"""What is read from a model directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.model_dir import (
    CHAT_TEMPLATE,
    EOS,
    MAX_MODEL_LEN,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    write_model_dir,
)
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from pagoda_gateway.text.answers import HowRead
from pagoda_gateway.text.chat import BadTemplate
from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.model_text import BadModelFiles, ModelText
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_gateway.text.vocabulary import UnsupportedTokenizer
from pagoda_proto.errors import PagodaError

MESSAGES = [{"role": "user", "content": "hello"}]


def load(root: Path, **changes: Any) -> ModelText:
    return ModelText.load(write_model_dir(root, **changes))


def test_the_facts_of_a_model(tmp_path: Path) -> None:
    model = load(tmp_path)
    eos = model.tokenizer.token_to_id(EOS)
    assert (model.max_model_len, model.eos_token_ids, model.vocab_size) == (MAX_MODEL_LEN, (eos,), eos + 1)
    assert model.decode(model.encode("hello 🙂")) == "hello 🙂"
    assert model.token_bytes(model.encode(" hello")[0]) == b" hello"


def test_all_ends_of_sequence_count(tmp_path: Path) -> None:
    model = load(tmp_path, generation_config={"eos_token_id": [3, 5]})
    assert model.eos_token_ids == (3, 5, model.tokenizer.token_to_id(EOS))
    model = load(
        tmp_path,
        generation_config={"eos_token_id": None},
        config={"eos_token_id": 7},
        tokenizer_config={"eos_token": None},
    )
    assert model.eos_token_ids == (7,)


def test_ends_that_the_model_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(tmp_path, generation_config={"eos_token_id": [3, 99_999, -1]})
    assert model.eos_token_ids == (3, model.tokenizer.token_to_id(EOS))
    assert "[99999, -1]" in caplog.text


def test_a_logits_width_beyond_the_tokenizer(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        config={"vocab_size": 4096, "max_position_embeddings": None, "text_config": {"max_position_embeddings": 77}},
    )
    assert (model.vocab_size, model.max_model_len) == (4096, 77)
    assert model.decode([4000]) == ""


def test_the_authors_sampling_defaults(tmp_path: Path) -> None:
    given = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": None,
        "do_sample": True,
        "max_length": 5,
    }
    assert load(tmp_path, generation_config=given).sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert load(tmp_path, generation_config={"do_sample": False, "top_k": 1}).sampling_defaults == {"temperature": 0.0}
    assert load(tmp_path).sampling_defaults == {}


def test_what_an_author_recommends_in_vain_is_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"temperature": 0.6, "top_p": 0, "top_k": -1.0}
    assert load(tmp_path, generation_config=given).sampling_defaults == {"temperature": 0.6, "top_k": 0}
    assert "top_p: must be above 0 and at most 1, got 0" in caplog.text


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("setting", [None, False, True])
def test_the_beginning_of_sequence_token(tmp_path: Path, processor: bool, setting: bool | None) -> None:
    tokenizer = byte_fallback_tokenizer()
    if processor:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model = load(tmp_path, tokenizer=tokenizer, tokenizer_config={"bos_token": "<s>", "add_bos_token": setting})
    plain = tokenizer.encode("he", add_special_tokens=False).ids
    wanted = processor if setting is None else setting
    assert model.encode("he") == ([1, *plain] if wanted else plain)
    assert model.encode("he", add_special_tokens=False) == plain


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert len(load(tmp_path, tokenizer=tokenizer).encode("abcde")) == 5


def test_markers_of_tool_calls_are_visible_where_they_are_read(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<tool_call>", special=True)])
    model = load(tmp_path, tokenizer=tokenizer)
    ids = model.encode(f"<tool_call>{EOS}")
    assert model.decode(ids) == ""
    visible = model.formats.visible(HowRead(functions=(Function(name="f"),)))
    assert Detokenizer(model.table, visible=visible).push(ids) == "<tool_call>"
    assert model.formats.visible(HowRead()) == frozenset()


def test_what_an_operator_names_wins_over_the_template(tmp_path: Path) -> None:
    root = write_model_dir(tmp_path)
    formats = ModelText.load(root).formats
    assert formats.tools is not None
    assert "hermes" in formats.tools.names
    assert formats.reasoning is None
    named = ModelText.load(root, tool_parser="kimi_k2", reasoning_parser="deepseek_r1").formats
    assert named.tools is not None
    assert named.reasoning is not None
    assert "kimi_k2" in named.tools.names
    assert "deepseek_r1" in named.reasoning.names


def test_templates_and_where_they_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B{{ tools }}"}]
    model = load(tmp_path, tokenizer_config={"chat_template": named})
    assert model.render_chat(MESSAGES) == "A"
    assert model.render_chat(MESSAGES, tools=[{}]) == "B[{}]"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert ModelText.load(tmp_path).render_chat(MESSAGES) == "C"
    assert ModelText.load(tmp_path, "D{{ bos_token }}").render_chat(MESSAGES, tools=[{}]) == "D"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    model = load(tmp_path, tokenizer_config={"chat_template": None})
    with pytest.raises(PagodaError, match="no chat template") as caught:
        model.encode_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_a_chat_is_tokenised_without_further_special_tokens(tmp_path: Path) -> None:
    model = load(tmp_path)
    ids = model.encode_chat(MESSAGES, mood="x")
    assert model.decode(ids, skip_special_tokens=False) == model.render_chat(MESSAGES, mood="x")
    assert ids[0] == model.tokenizer.token_to_id("<|im_start|>")


def test_bad_words_come_with_and_without_a_space(tmp_path: Path) -> None:
    model = load(tmp_path)
    hello, spaced = model.encode("hello"), model.encode(" hello")
    assert model.bad_words(["hello", " hello"]) == (tuple(hello), tuple(spaced)) * 2


def test_a_bad_word_is_banned_in_each_form_however_many_tokens_it_has(byte_level: ModelText) -> None:
    words = (byte_level.decode([i]) for i in range(byte_level.vocab_size))
    spaced_words = (word for word in words if word[:1] == " " and word[1:].isalpha())
    word = next(one for one in spaced_words if len(byte_level.encode(one[1:])) > len(byte_level.encode(one)) == 1)
    plain, spaced = tuple(byte_level.encode(word[1:])), tuple(byte_level.encode(word))
    assert byte_level.bad_words([word]) == (plain, spaced)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.text(alphabet="hello world", max_size=40))
def test_a_texts_size_bounds_its_tokens_from_below(byte_level: ModelText, text: str) -> None:
    assert byte_level.min_tokens_of(len(text)) <= len(byte_level.encode(text, add_special_tokens=False))
    assert byte_level.min_tokens_of(1300) == 100


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load(tmp_path_factory.mktemp("model"))


def test_no_bound_where_tokens_can_swallow_anything(tmp_path: Path) -> None:
    assert load(tmp_path, tokenizer=byte_fallback_tokenizer()).min_tokens_of(1000) == 0
    stripping = byte_level_tokenizer()
    stripping.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert load(tmp_path, tokenizer=stripping).min_tokens_of(1000) == 0


def test_hostile_text_is_tokenised_in_linear_time(byte_level: ModelText) -> None:
    for text in ("a" * 400_000, "e" + "\u0301" * 200_000, " " * 400_000, "<|im_end|>" * 40_000):
        assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 99999999999999}, "merges": []}}'),
        ("tokenizer.json", b"\xff"),
        ("config.json", "[]"),
        ("config.json", "{"),
        ("tokenizer_config.json", '{"a":' * 100_000),
        ("generation_config.json", "nope"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | bytes | None) -> None:
    path = write_model_dir(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadModelFiles, match=name):
        ModelText.load(tmp_path)


def test_the_text_side_needs_no_server() -> None:
    """The offline API uses it in processes without a web server installed."""
    code = (
        "import sys, pagoda_gateway.text.generation, pagoda_gateway.text.answers\n"
        "print(sorted({'fastapi', 'starlette', 'pydantic', 'grpc', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bad_decoders_and_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTemplate):
        load(tmp_path, tokenizer_config={"chat_template": "{% if"})
    definition = json.loads(byte_level_tokenizer().to_str())
    definition["decoder"] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    write_model_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UnsupportedTokenizer, match="Strip"):
        ModelText.load(tmp_path, CHAT_TEMPLATE)
