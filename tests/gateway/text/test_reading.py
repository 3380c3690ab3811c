from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.model_dir import word_tokenizer, write_model_dir, write_reader_dir

from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.reading import QWEN3_RERANKER, Cut, NoRoom, Tokens, encode, read_files, templated
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED, GENERATE

TOKENIZER = word_tokenizer()
CLS, SEP, A, B, C = 2, 3, 4, 5, 6
QUERY, COLON = 10, 11


@pytest.mark.parametrize(
    ("keep", "left", "ids"),
    [
        (None, False, [CLS, A, B, C, SEP]),
        (4, False, [CLS, A, B, SEP]),
        (4, True, [CLS, B, C, SEP]),
    ],
)
def test_a_text_that_is_cut_keeps_its_special_tokens(keep: int | None, left: bool, ids: list[int]) -> None:
    assert encode(TOKENIZER, "a b c", None, Cut(keep, left)).token_ids == ids
    assert encode(TOKENIZER, "a b c", None, Cut(2), special=False).token_ids == [A, B]


@pytest.mark.parametrize("left", [False, True])
def test_a_cut_that_leaves_nothing_of_a_text_is_refused(left: bool) -> None:
    for keep in (1, 2):
        with pytest.raises(NoRoom) as error:
            encode(TOKENIZER, "a b c", None, Cut(keep, left))
        assert error.value.least == 3
    assert encode(TOKENIZER, "", None, Cut(2, left)).token_ids == [CLS, SEP]
    with pytest.raises(NoRoom):
        encode(TOKENIZER, "", None, Cut(1, left))
    with pytest.raises(NoRoom) as error:
        encode(TOKENIZER, "a b", "c", Cut(4, left))
    assert error.value.least == 5


def test_a_prompt_stays_when_its_text_is_cut() -> None:
    assert encode(TOKENIZER, "a b", None, Cut(5), prompt="query : ").token_ids == [CLS, QUERY, COLON, A, SEP]
    assert encode(TOKENIZER, "a b", None, Cut(document=1), prompt="query : ").token_ids == [CLS, QUERY, COLON, A, SEP]
    with pytest.raises(NoRoom) as error:
        encode(TOKENIZER, "a b", None, Cut(4), prompt="query : ")
    assert error.value.least == 5


def test_a_document_is_cut_alone() -> None:
    cut = Cut(document=2)
    assert encode(TOKENIZER, "a b c a", "c a b", cut) == Tokens([CLS, A, B, C, A, SEP, C, A, SEP], 6)
    assert encode(TOKENIZER, "a b c", None, cut).token_ids == [CLS, A, B, SEP]
    assert encode(TOKENIZER, "a b c a", "c a b", Cut(8, document=2)) == Tokens([CLS, A, B, C, SEP, C, A, SEP], 5)


def test_a_pair_tells_where_its_second_text_begins_and_the_longer_one_is_cut() -> None:
    assert encode(TOKENIZER, "a b", "c a b c") == Tokens([CLS, A, B, SEP, C, A, B, C, SEP], 4)
    assert encode(TOKENIZER, "a b", "c a b c", Cut(7)) == Tokens([CLS, A, B, SEP, C, A, SEP], 4)
    assert encode(TOKENIZER, "c a b c", "a", Cut(6)) == Tokens([CLS, C, A, SEP, A, SEP], 4)


@settings(max_examples=40)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8), st.integers(5, 20))
def test_what_is_kept_is_as_much_as_fits(first: list[str], second: list[str], keep: int) -> None:
    whole = encode(TOKENIZER, " ".join(first), " ".join(second)).token_ids
    cut = encode(TOKENIZER, " ".join(first), " ".join(second), Cut(keep)).token_ids
    assert len(cut) == min(keep, len(whole))


def test_a_judged_pair_is_put_as_its_authors_put_it_and_forges_nothing(tmp_path: Path) -> None:
    text = ModelText.load(write_model_dir(tmp_path))
    tokens = templated(text.tokenizer, text.special, QWEN3_RERANKER, ("judge", "q<|im_end|>", "doc"))
    said = text.decode(tokens.token_ids, skip_special_tokens=False)
    pair = "<Instruct>: judge\n<Query>: q<|im_end|>\n<Document>: doc"
    assert said == QWEN3_RERANKER.before + pair + QWEN3_RERANKER.after
    (end,) = text.encode("<|im_end|>")
    assert tokens.token_ids.count(end) == (QWEN3_RERANKER.before + QWEN3_RERANKER.after).count("<|im_end|>")


def test_only_the_document_of_a_judged_pair_is_cut(tmp_path: Path) -> None:
    text = ModelText.load(write_model_dir(tmp_path))

    def put(document: str, cut: Cut) -> str:
        found = templated(text.tokenizer, text.special, QWEN3_RERANKER, ("judge", "what is it", document), cut)
        assert len(found.token_ids) <= (cut.keep or 10**6)
        return text.decode(found.token_ids, skip_special_tokens=False)

    def whole(document: str) -> str:
        pair = f"<Instruct>: judge\n<Query>: what is it\n<Document>: {document}"
        return QWEN3_RERANKER.before + pair + QWEN3_RERANKER.after

    assert put("xyz" * 90, Cut(document=4)) == whole("xyzx")
    assert put("xyz", Cut(document=4096)) == whole("xyz")
    least = len(text.encode(whole("x")))
    assert put("xyz" * 90, Cut(least)) == whole("x")
    assert put("xyz" * 90, Cut(least + 9, document=2)) == whole("xy")
    for keep in (least - 1, 1):
        with pytest.raises(NoRoom) as error:
            put("xyz", Cut(keep))
        assert error.value.least == least
    with pytest.raises(NoRoom):
        put("", Cut(least - 2))


def test_what_the_files_say_is_read(tmp_path: Path) -> None:
    root = write_reader_dir(tmp_path, id2label={"0": "bad", "1": "good"})
    sentence = {"prompts": {"query": "query: ", "odd": 3}, "default_prompt_name": "query"}
    (root / "config_sentence_transformers.json").write_text(json.dumps(sentence))
    own = ModelText.load(root).reading
    assert (own.kind, own.width, own.labels, own.dimensions) == (EMBED, 3, ("bad", "good"), None)
    assert (dict(own.prompts), own.default_prompt) == ({"query": "query: "}, "query")
    assert ModelText.load(write_model_dir(tmp_path / "other")).reading.kind == GENERATE
    assert ModelText.load(root, task=CLASSIFY).reading.kind == CLASSIFY


@pytest.mark.parametrize("sentence", [{}, {"prompts": {"query": "query: "}}, {"prompts": {}}])
def test_a_default_prompt_that_is_none_of_the_prompts_is_refused(sentence: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="'default_prompt_name' 'document' is no prompt"):
        read_files(EMBED, {}, sentence | {"default_prompt_name": "document"}, yes_no=False)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_texts_are_put_in_lower_case_where_files_say_so(name: str, tmp_path: Path) -> None:
    root = write_reader_dir(tmp_path)
    plain = ModelText.load(root)
    (root / name).write_text(json.dumps({"max_seq_length": 64, "do_lower_case": True}))
    lowered = ModelText.load(root)
    text = "A b C"
    assert lowered.tokenizer.encode(text).ids == plain.tokenizer.encode(text.lower()).ids
    assert lowered.tokenizer.encode(text).ids != plain.tokenizer.encode(text).ids
    generating = ModelText.load(root, task=GENERATE)
    assert generating.tokenizer.encode(text).ids == plain.tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, None),
        ({"matryoshka_dimensions": [8, 4]}, (8, 4)),
        ({"is_matryoshka": True}, ()),
        ({"architectures": ["Qwen3ForCausalLM"]}, ()),
        ({"architectures": ["Gemma3TextModel"]}, (128, 256, 512)),
        ({"matryoshka_dimensions": "8"}, None),
    ],
)
def test_which_dimensions_a_model_has_learned(config: dict[str, object], found: tuple[int, ...] | None) -> None:
    assert read_files(EMBED, config, {}, yes_no=False).dimensions == found


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"0": "x"}}, ("x",)),
        ({"num_labels": 10**9}, ("LABEL_0", "LABEL_1")),
    ],
)
def test_labels(config: dict[str, object], labels: tuple[str, ...]) -> None:
    assert read_files(CLASSIFY, config, {}, yes_no=False).labels == labels
    assert read_files(CLASSIFY, config, {}, yes_no=True).labels == ("yes",)
