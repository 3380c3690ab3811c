"""Whatever a grammar does to the process that compiles it, it gets a verdict, and the next grammar is checked."""

from __future__ import annotations

import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.worker.grammars.support import NONE, end, small_grammars

from pagoda_engine_core.grammars import checker
from pagoda_engine_core.grammars.checker import GrammarChecker
from pagoda_engine_core.grammars.program import problem_of
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_proto import grammars
from pagoda_proto.errors import ErrorCode, PagodaError

HOSTILE = (sys.executable, str(Path(__file__).with_name("hostile_program.py")))
WAIT_S = 120.0
SLOW = grammars.json_schema({"type": "integer", "multipleOf": 999_983})
"""llguidance needs more than two seconds for it, today; see `test_a_grammar_that_takes_too_long_is_refused`."""

Ask = Callable[[str], Verdict]


@contextmanager
def checking(*command: str) -> Iterator[Ask]:
    made = GrammarChecker(command or checker.COMMAND)
    answers: queue.Queue[tuple[str, Verdict]] = queue.Queue()

    def ask(grammar: str) -> Verdict:
        made.check(grammar, "", lambda *answer: answers.put(answer))
        name, verdict = answers.get(timeout=WAIT_S)
        assert name == grammar
        return verdict

    try:
        yield ask
    finally:
        made.close()


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with checking() as asking:
        yield asking


@pytest.fixture
def ask_hostile() -> Iterator[Ask]:
    with checking(*HOSTILE) as asking:
        yield asking


def told(verdict: Verdict) -> str:
    assert verdict.error is not None
    assert (verdict.error.code, verdict.error.param) == (ErrorCode.INVALID_ARGUMENT, "grammar")
    return verdict.error.message


GOOD = [
    grammars.json_object(),
    grammars.json_schema({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number"}}}),
    grammars.json_schema({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": [1, None, "x"]}]}),
    grammars.regex("(a|b)*c/d\n[0-9]{2,}"),
    grammars.choice(["red", "", "a\nb\"'/\\", "<|im_end|>"]),
    grammars.lark('start: x ","\nx: /[0-9]+/ | "(" x ")"'),
    "start: /plain lark/",
    grammars.lark("start: <tool_call> /x/"),  # only workers know whether the model has this token
]


@pytest.mark.parametrize("grammar", GOOD)
def test_what_can_be_compiled_passes(ask: Ask, grammar: str) -> None:
    assert ask(grammar) == Verdict(None, final=True)


BAD = [
    ("", "Empty grammar"),
    ("\0", "lexer error"),
    ("{}", "grammars"),
    ("[1]", "expecting rule"),
    ('{"a":' * 20_000, "EOF"),
    (grammars.lark("start: nobody"), 'unknown name: "nobody"'),
    (grammars.lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), "nested"),
    (grammars.lark('root ::= "a"'), "Expected token"),
    (grammars.regex("a("), "unclosed group"),
    (grammars.regex("(?=a)b"), "look-around"),
    (grammars.regex("(a)\\1"), "backreferences"),
    (grammars.regex("(" * 1500 + "a" + ")" * 1500), "invalid regex"),
    (grammars.json_schema({"type": "bogus"}), "Invalid type: bogus"),
    (grammars.json_schema({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
    (grammars.json_schema({"$ref": "http://example.com/schema"}), "does not fetch"),
    (grammars.json_schema({"$ref": "#"}), "NoExtension"),
    (grammars.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (grammars.json_schema({"properties": {"a/b": {"items": {"not": {}}}}}), "/properties/a~1b/items/not: Unimpl"),
]


@pytest.mark.parametrize(("grammar", "says"), BAD)
def test_what_cannot_is_refused_in_words_that_are_final(ask: Ask, grammar: str, says: str) -> None:
    verdict = ask(grammar)
    assert says in told(verdict)
    assert verdict.final
    assert len(told(verdict)) < 500


def test_what_grows_too_large_runs_out_of_fuel_first() -> None:
    """Compiled here without a time limit, which a slow machine would reach first."""
    grown = grammars.json_schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949)]})
    assert "fuel" in problem_of(grown)


def test_a_grammar_that_takes_too_long_is_refused(ask: Ask) -> None:
    verdict = ask(SLOW)
    assert (
        told(verdict) == "this grammar or schema cannot be used: it takes more than 0.1 s of processor time to compile"
    )
    assert not verdict.final  # a slow machine may have been at fault
    assert ask(grammars.json_object()).error is None


@pytest.mark.parametrize(
    "catastrophe",
    [
        grammars.regex("(a+)+b" * 200),
        grammars.regex("((a{0,1000}){0,1000}){0,1000}"),
        grammars.regex("(.*a.{1,30}){1,20}"),
        grammars.lark("start: e\ne: e e | e e e | e e e e | /a/"),
        grammars.json_schema({"enum": [f"x{i:06}" for i in range(9000)]}),
    ],
)
def test_what_is_harmless_here_compiles_in_a_worker_as_well(ask: Ask, catastrophe: str) -> None:
    """The checker and the workers have the same limits."""
    assert ask(catastrophe).error is None
    assert small_grammars().matcher(catastrophe, [end()], NONE).error == ""


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("spin", "more than 0.1 s of processor time"),
        ("after, spin", "more than 0.1 s of processor time"),
        ("wait", "longer than 2 s"),
        ("stop", "longer than 2 s"),
        ("eat", "more than 512 MB"),
        ("crash", "breaks the compiler"),
    ],
)
def test_sec_16_what_takes_the_process_down_is_refused_and_the_next_is_checked(
    ask_hostile: Ask, order: str, says: str
) -> None:
    first = told(ask_hostile("pid"))
    verdict = ask_hostile(order)
    assert says in told(verdict)
    assert not verdict.final
    assert told(ask_hostile("pid")) != first
    assert ask_hostile("fine").error is None


def test_the_process_is_kept_while_it_lives_and_replaced_when_it_does_not(ask_hostile: Ask) -> None:
    pid = int(told(ask_hostile("pid")).rpartition(" ")[2])
    assert told(ask_hostile("bad")) == "this grammar or schema cannot be used: bad grammar"
    assert int(told(ask_hostile("pid")).rpartition(" ")[2]) == pid
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=WAIT_S)
    assert int(told(ask_hostile("pid")).rpartition(" ")[2]) != pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_that_no_grammar_has_caused_is_no_answer_to_the_next(ask_hostile: Ask, number: int) -> None:
    process = psutil.Process(int(told(ask_hostile("pid")).rpartition(" ")[2]))
    process.send_signal(number)
    psutil.wait_procs([process], timeout=WAIT_S)
    assert told(ask_hostile("bad")) == "this grammar or schema cannot be used: bad grammar"
    assert ask_hostile("fine") == Verdict(None, final=True)


@pytest.mark.parametrize("order", ["spin", "wait", "eat", "crash"])
def test_the_compiler_is_not_loaded_anew_for_what_a_grammar_took_down(ask_hostile: Ask, order: str) -> None:
    fork, parent = told(ask_hostile("pid")), told(ask_hostile("parent"))
    verdict = ask_hostile(order)
    assert (verdict.final, verdict.dear) == (False, True)
    assert told(ask_hostile("parent")) == parent
    assert told(ask_hostile("pid")) != fork


def test_what_finds_no_room_is_refused_and_what_makes_room_is_told() -> None:
    made, heard = GrammarChecker(HOSTILE), queue.Queue[tuple[str, Verdict]]()
    made.check("wait", "first", lambda *_: None)  # stays in the checker all along
    with pytest.raises(PagodaError, match="waiting to be checked") as refused:
        for place in range(2 + checker.MAX_WAITING):
            made.check(f"{place}", "first", lambda *answer: heard.put(answer))
    assert refused.value.code is ErrorCode.OVERLOADED
    made.check("mine", "second", lambda *_: None)
    displaced, verdict = heard.get(timeout=WAIT_S)
    assert int(displaced) >= checker.MAX_WAITING - 2
    assert verdict.error is not None
    assert (verdict.error.code, verdict.final, verdict.dear) == (ErrorCode.OVERLOADED, False, False)
    made.close()


@pytest.mark.parametrize(
    "command", [("/nowhere/at-all",), (sys.executable, "-c", ""), (sys.executable, "-c", "print('what' * 9)")]
)
def test_without_its_process_nothing_is_judged(command: tuple[str, ...]) -> None:
    with checking(*command) as asking:
        verdict = asking("start: /a/")
    assert verdict.error is not None
    assert verdict.error.code is ErrorCode.UNAVAILABLE
    assert not verdict.final


def test_it_ends_with_its_checker() -> None:
    with checking(*HOSTILE) as asking:
        process = psutil.Process(int(told(asking("pid")).rpartition(" ")[2]))
    assert psutil.wait_procs([process], timeout=WAIT_S)[1] == []


def test_what_raises_about_a_grammar_is_its_verdict_and_the_next_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = checker._Process.ask

    def ask(process: checker._Process, text: bytes) -> bytes:
        return b"\xff" if text == b"odd" else answer(process, text)  # not UTF-8

    monkeypatch.setattr(checker._Process, "ask", ask)
    with checking() as asking:
        odd = asking("odd")
        assert odd.error is not None
        assert (odd.error.code, odd.error.param, odd.final) == (ErrorCode.INTERNAL, "grammar", False)
        assert asking(GOOD[0]) == Verdict(None, final=True)


def test_what_nothing_fits_and_a_bound_that_leaks_are_said_in_words(ask: Ask) -> None:
    assert "nothing that fits it" in told(ask(grammars.json_schema({"$ref": "#"})))
    leaking = {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}
    assert "/exclusiveMinimum: a whole number" in told(ask(grammars.json_schema(leaking)))
