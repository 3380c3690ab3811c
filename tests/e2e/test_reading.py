"""A pooling model, served as a user would: it is recognised by its files, and its vectors survive any process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.e2e.stack import Stack, kill, running_stack
from tests.gateway.model_dir import word_tokenizer
from tests.worker.encoders.checkpoints import save

pytestmark = pytest.mark.e2e
WORDS = ("a", "b", "c", "dog", "cat", "what", "is")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so large that one HTTP request takes many steps."""
    path = tmp_path_factory.mktemp("reader") / "bert"
    save(path, "bert", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    word_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("s"), model=str(model), workers=2) as running:
        yield running


def texts(count: int) -> list[str]:
    return [" ".join(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(5 + (i * 37) % 250)) for i in range(count)]


def vectors(stack: Stack, inputs: list[str]) -> list[list[float]]:
    answer = stack.client(timeout=240).embeddings.create(model="bert", input=inputs)
    return [one.embedding for one in answer.data]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[list[float]]:
    """The vector of each text, requested alone."""
    return [vectors(stack, [text])[0] for text in texts(24)]


def test_vectors_are_a_texts_own_whatever_stands_beside_it(stack: Stack, undisturbed: list[list[float]]) -> None:
    found = vectors(stack, texts(120))
    assert found[:24] == undisturbed
    assert all(len(vector) == 256 for vector in found)


@pytest.mark.parametrize("role", ["worker", "engine-core"])
def test_a_body_outlasts_the_death_of_a_process(role: str, stack: Stack, undisturbed: list[list[float]]) -> None:
    found: list[list[float]] = []
    asking = threading.Thread(target=lambda: found.extend(vectors(stack, texts(300))))
    asking.start()
    stack.wait_until(lambda: any(worker.num_rows for worker in stack.ready_workers()))
    busy = max(stack.ready_workers(), key=lambda worker: worker.num_rows)
    kill(busy.pid if role == "worker" else stack.children("engine-core")[0].pid)
    asking.join(240)
    assert not asking.is_alive()
    assert found[:24] == undisturbed
    assert len(found) == 300
    stack.wait_until(lambda: len(stack.ready_workers()) == 2)


def test_who_leaves_leaves_nothing_behind(stack: Stack) -> None:
    with pytest.raises(openai.APITimeoutError):
        stack.client(timeout=0.05).embeddings.create(model="bert", input=texts(1500))
    stack.wait_until(lambda: stack.stats().load.num_running == stack.stats().load.num_waiting == 0)


def test_the_model_says_what_it_is_for(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        stack.client().chat.completions.create(model="bert", messages=[{"role": "user", "content": "a"}])
