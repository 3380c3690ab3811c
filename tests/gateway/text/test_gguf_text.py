"""A GGUF file's text side equals that of the directory it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gguf_files import DEMO, GgufFile, Stored, demo_pairs, demo_tensors, write_demo

from pagoda_gateway.text.chat import BadTemplate
from pagoda_gateway.text.model_text import BadModelFiles, ModelText
from pagoda_gateway.text.vocabulary import UnsupportedTokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you, <|im_end|>?"}]


def test_chats_ends_and_defaults_are_the_same(tmp_path: Path) -> None:
    ours, wanted = ModelText.load(write_demo(tmp_path / "m.gguf")), ModelText.load(DEMO)
    assert ours.encode_chat(CHAT) == wanted.encode_chat(CHAT)
    assert ours.render_chat(CHAT, tools=[]) == wanted.render_chat(CHAT, tools=[])
    assert set(ours.eos_token_ids) == set(wanted.eos_token_ids)
    assert (ours.vocab_size, ours.max_model_len) == (wanted.vocab_size, wanted.max_model_len)
    assert ours.sampling_defaults == {"temperature": 0.0}
    assert [ours.token_bytes(i) for i in range(512)] == [wanted.token_bytes(i) for i in range(512)]
    assert ours.formats.tools == wanted.formats.tools


def test_a_vocabulary_without_the_whole_tokenizer_reads_and_writes_any_text(tmp_path: Path) -> None:
    """Llama 3's pre-tokenizer replaces the model's own: tokens differ, but the text is the same."""
    path = GgufFile(demo_pairs(whole_tokenizer=False), demo_tensors()).write(tmp_path / "m.gguf")
    text = ModelText.load(path)
    for written in ("the answer is 42\n\n", "日本 naïve 🙂"):
        assert text.decode(text.encode(written)) == written
    special = json.loads((DEMO / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert text.encode("<|im_start|><tool_call>") == [510, 507]
    pairs = demo_pairs(whole_tokenizer=False) | {"tokenizer.ggml.bos_token_id": 509}
    written = "<|endoftext|>hello"  # is kept, though the tokenizer would put nothing before a text
    assert ModelText.load(GgufFile(pairs, demo_tensors()).write(tmp_path / "bos.gguf")).encode(written)[0] == 509
    assert text.table.special_ids == {int(i) for i, token in special.items() if token["special"]}


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadModelFiles, match=r"^m\.gguf: the file ends within its header$"):
        ModelText.load(tmp_path / "m.gguf")
    pairs = demo_pairs(whole_tokenizer=False) | {"tokenizer.ggml.pre": "viking"}
    path = GgufFile(pairs, demo_tensors()).write(tmp_path / "m.gguf")
    with pytest.raises(BadModelFiles, match=r"^m\.gguf: 'tokenizer\.ggml\.pre' is 'viking', not one of"):
        ModelText.load(path)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sec_30_damage_of_a_gguf_is_refused_by_the_gateway(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Or it does no harm: a loaded tokenizer reads and writes text."""
    tensors = {"token_embd.weight": Stored(bytes(64), (1, 32), "F16")}
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    raw = bytearray(GgufFile(demo_pairs(whole_tokenizer=False), tensors).encoded())
    for _ in range(data.draw(st.integers(1, 2))):
        raw[data.draw(st.integers(0, len(raw) - 65))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        text = ModelText.load(path)
    except (BadModelFiles, BadTemplate, UnsupportedTokenizer):
        return
    text.decode(text.encode("hello, world"))
