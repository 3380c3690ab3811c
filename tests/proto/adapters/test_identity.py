"""An adapter is its content: what is the same has one digest, whatever it is called, and whatever else has another."""

from __future__ import annotations

import pytest

from pagoda_proto.adapters.identity import Adapter, adapter_problems, digest_of, named_paths

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
    assert named_paths("") == {}
    assert named_paths("a=/x, org/b=y/z=1,") == {"a": "/x", "org/b": "y/z=1"}


@pytest.mark.parametrize("text", ["a", "=x", "a=", "a b=x", "a=x,a=y", "/a=x", "x" * 300 + "=y", "a\\b=x"])
def test_what_names_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lora_modules"):
        named_paths(text)
