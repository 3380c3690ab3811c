"""An adapter is identified by its content: equal content has one digest, whatever its name; other content another."""

from __future__ import annotations

import pytest

from pagoda_proto.adapters.identity import Adapter, NamedAdapter, adapter_problems, digest_of, read_lora_modules

WEIGHTS = b"w" * 32


def test_a_digest_is_of_weights_and_of_what_the_config_says_however_it_is_spelt() -> None:
    digest = digest_of({"r": 8, "lora_alpha": 16}, WEIGHTS)
    assert digest == digest_of({"lora_alpha": 16, "r": 8}, WEIGHTS)
    others = [digest_of({"r": 8, "lora_alpha": 17}, WEIGHTS), digest_of({"r": 8, "lora_alpha": 16}, b"v" * 32)]
    assert len({digest, *others}) == 3
    assert not list(adapter_problems(Adapter(digest, "/a")))


@pytest.mark.parametrize(
    "adapter", [Adapter("", "/a"), Adapter("g" * 64, "/a"), Adapter("1" * 64, ""), Adapter("1" * 64, "/" * 5000),
                Adapter("1" * 64, "a\0b"), Adapter("1" * 64 + "\n", "/a")],
)  # fmt: skip
def test_a_record_names_an_adapter_by_a_digest_and_a_path(adapter: Adapter) -> None:
    assert [problem.param for problem in adapter_problems(adapter)] == ["adapter"]


def test_names_lead_to_paths() -> None:
    assert read_lora_modules("") == {}
    assert read_lora_modules("a=/x, org/b=y/z=1,") == {"a": NamedAdapter("/x"), "org/b": NamedAdapter("y/z=1")}


def test_objects_of_json_stand_beside_them() -> None:
    one, two = '{"name": "a", "path": "/x, y"}', '{"path": "/z", "base_model_name": "base", "name": "c"}'
    three = '{"name": "d", "path": "/w", "base_model_name": null}'
    expected = {
        "a": NamedAdapter("/x, y"), "b": NamedAdapter("/y"), "c": NamedAdapter("/z", "base"), "d": NamedAdapter("/w"),
    }  # fmt: skip
    assert read_lora_modules(f"{one},b=/y,{two} {three}") == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *((text, "must be name=path") for text in ("a", "=x", "a=", "a b=x", "/a=x", "x" * 300 + "=y", "a\\b=x")),
        ("a=x,a=y", "is given twice"),
        ('{"name": "a", "path": "x"} a=y', "is given twice"),
        ('{"name": "a", "path": "x", "rank": 8}', "'rank' is not a field"),
        ('{"name": "a", "path": 3}', "path must be text"),
        ('{"name": "a", "path": "x", "base_model_name": 3}', "base_model_name must be text"),
        ('{"name": "a"}', "name and path"),
        ('{"name": "a b", "path": "x"}', "without spaces"),
        ('{"name": "a"', "not a JSON object"),
        ("{" * 100_000, "not a JSON object"),
        ('["a"]', "must be name=path"),
        ('{"name": "a", "path": "x", "path": "y"}', "a field is given twice: 'path'"),
        ('{"name": "a", "path": "x\\u0000"}', "must be printable"),
        ('{"name": "a\\ud800", "path": "x"}', "must be printable"),
        ('{"name": "a", "path": "x", "base_model_name": "\\n"}', "must be printable"),
        ("a=x\0", "must be printable"),
    ],
)
def test_what_names_no_path_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"lora_modules: .*{part}"):
        read_lora_modules(text)
