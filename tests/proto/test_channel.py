from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proto.strategies import LOGPROBS, TEXT, TOKEN_TUPLE, TOKENS, U32, sampling_params

from pagoda_proto.channel import (
    MAX_FRAME_BYTES,
    MAX_ID_BYTES,
    Envelope,
    FrameError,
    OtherVersionError,
    decode_from_worker,
    decode_to_worker,
    encode,
    open_envelope,
)
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    AppendBlocks,
    Beat,
    BeatAck,
    Chunk,
    Drain,
    FromWorker,
    Goodbye,
    Hello,
    KVGroup,
    Message,
    NewRow,
    Refused,
    ReplaceBlock,
    ResetWorker,
    RowError,
    RowOutput,
    StepFailed,
    StepPlan,
    StepResult,
    ToWorker,
    Versions,
    Welcome,
)

U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e9)
NEW_ROWS = st.builds(
    NewRow,
    row_id=U32,
    token_ids=TOKENS,
    num_prompt_tokens=U32,
    num_computed=U32,
    block_ids=TOKENS,
    params=sampling_params(),
    seed=U64,
    choice=U32,
    eos_token_ids=TOKEN_TUPLE,
)
MANY_LOGPROBS = st.none() | st.lists(LOGPROBS, max_size=2)
MESSAGES: dict[type[Message], st.SearchStrategy[Any]] = {
    StepPlan: st.builds(
        StepPlan,
        step=U32,
        finished_rows=TOKENS,
        new_rows=st.lists(NEW_ROWS, max_size=2),
        append_blocks=st.lists(st.builds(AppendBlocks, U32, TOKENS), max_size=2),
        replace_blocks=st.lists(st.builds(ReplaceBlock, U32, U32, U32), max_size=2),
        swap_outs=st.lists(st.tuples(U32, U32), max_size=2),
        swap_ins=st.lists(st.tuples(U32, U32), max_size=2),
        block_copies=st.lists(st.tuples(U32, U32), max_size=2),
        chunks=st.lists(st.builds(Chunk, U32, U32, U32, st.booleans()), max_size=2),
    ),
    Welcome: st.builds(Welcome, epoch=U64, engine_boot_id=TEXT, lease_s=SECONDS),
    Refused: st.builds(Refused, reason=TEXT, final=st.booleans()),
    BeatAck: st.just(BeatAck()),
    Drain: st.just(Drain()),
    ResetWorker: st.just(ResetWorker()),
    Hello: st.builds(
        Hello,
        protocol=U32,
        worker_id=TEXT,
        incarnation=TEXT,
        registration=U32,
        model_fingerprint=TEXT,
        numerics_id=TEXT,
        vocab_size=U32,
        max_model_len=U32,
        block_size=U32,
        device=TEXT,
        host_id=TEXT,
        pid=U32,
        max_rows=U32,
        max_tokens_per_step=U32,
        kv_groups=st.lists(st.builds(KVGroup, U32, U32, U32, SECONDS), max_size=3).map(tuple),
        oldest_protocol=U32,
    ),
    StepResult: st.builds(
        StepResult,
        step=U32,
        outputs=st.lists(st.builds(RowOutput, U32, TOKENS, MANY_LOGPROBS, MANY_LOGPROBS), max_size=2),
        errors=st.lists(st.builds(RowError, U32, TEXT, TEXT), max_size=2),
        elapsed_s=SECONDS,
        forward_s=SECONDS,
    ),
    Beat: st.builds(Beat, busy_s=SECONDS, rss_bytes=U64),
    StepFailed: st.builds(StepFailed, step=U32, reason=TEXT),
    Goodbye: st.builds(Goodbye, reason=TEXT),
}
ENVELOPES = st.builds(Envelope, TEXT, TEXT, U64, U64, st.just(PROTOCOL_VERSION))
HERE = Envelope("boot", "worker", 3, 7)
GOOD = encode(HERE, Drain())


def decoder_of(message: type[Message]) -> Any:
    return decode_to_worker if message in get_args(ToWorker) else decode_from_worker


def test_every_message_of_both_unions_is_tried() -> None:
    assert set(MESSAGES) == {*get_args(ToWorker), *get_args(FromWorker)}


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_survives_the_wire(message_type: type[Message]) -> None:
    @given(envelope=ENVELOPES, message=MESSAGES[message_type])
    def check(envelope: Envelope, message: Message) -> None:
        opened, payload = open_envelope(encode(envelope, message))
        assert opened == envelope
        assert decoder_of(message_type)(payload) == message

    check()


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_in_the_wrong_direction_is_no_message(message_type: type[Message]) -> None:
    wrong = decode_from_worker if decoder_of(message_type) is decode_to_worker else decode_to_worker

    @given(message=MESSAGES[message_type])
    def check(message: Message) -> None:
        with pytest.raises(FrameError):
            wrong(encode(HERE, message)[-1])

    check()


VERSIONS = st.tuples(st.integers(0, 255), st.integers(0, 255)).map(sorted).map(lambda both: Versions(*both))


@given(VERSIONS, VERSIONS)
def test_two_sides_speak_the_newest_that_both_know(one: Versions, other: Versions) -> None:
    agreed = one.agreed(other)
    assert agreed == other.agreed(one)
    both = set(range(one.oldest, one.newest + 1)) & set(range(other.oldest, other.newest + 1))
    assert agreed == max(both, default=None)


@given(VERSIONS, st.integers(0, 255))
def test_frames_of_every_version_that_is_spoken_are_opened(spoken: Versions, version: int) -> None:
    parts = encode(HERE._replace(version=version), Drain())
    if spoken.oldest <= version <= spoken.newest:
        assert open_envelope(parts, spoken)[0].version == version
        return
    with pytest.raises(OtherVersionError):
        open_envelope(parts, spoken)


def test_what_a_newer_version_adds_is_passed_over_and_what_an_older_one_leaves_out_is_its_default() -> None:
    told = msgspec.msgpack.encode({"type": "goodbye", "reason": "r", "future": [1, 2]})
    assert decode_from_worker(told) == Goodbye(reason="r")
    assert decode_from_worker(msgspec.msgpack.encode({"type": "goodbye"})) == Goodbye()


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_random_parts_raise_nothing_but_frame_errors(parts: list[bytes]) -> None:
    with suppress(FrameError):
        open_envelope(parts)


@given(index=st.integers(0, 4), part=st.binary(max_size=200))
def test_a_spoilt_envelope_is_refused_or_opened(index: int, part: bytes) -> None:
    with suppress(FrameError):
        envelope, payload = open_envelope([*GOOD[:index], part, *GOOD[index + 1 :]])
        assert payload == GOOD[5]
        assert isinstance(envelope, Envelope)


@given(st.binary(max_size=200))
def test_random_payloads_raise_nothing_but_frame_errors(payload: bytes) -> None:
    for decode in (decode_to_worker, decode_from_worker):
        with suppress(FrameError):
            assert isinstance(decode(payload), Message)


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for message in MESSAGES for name in message.__struct_fields__})


@given(
    tag=st.sampled_from([message.__struct_config__.tag for message in MESSAGES]),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSONISH, max_size=5),
)
def test_well_formed_msgpack_of_the_wrong_shape_is_a_frame_error(tag: str, fields: dict[str, Any]) -> None:
    payload = msgspec.msgpack.encode({"type": tag, **fields})
    for decode in (decode_to_worker, decode_from_worker):
        with suppress(FrameError):
            assert isinstance(decode(payload), Message)


@given(message=st.one_of(*MESSAGES.values()), data=st.data())
def test_a_damaged_payload_is_refused_or_another_message(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(HERE, message)[-1])
    for index in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=3)):
        payload[index] = data.draw(st.integers(0, 255))
    with suppress(FrameError):
        assert isinstance(decoder_of(type(message))(bytes(payload)), Message)


def test_parameters_out_of_range_are_a_frame_error() -> None:
    row = {
        "row_id": 1, "token_ids": [1], "num_prompt_tokens": 1, "num_computed": 0, "block_ids": [0], "params": {"n": 99},
        "seed": 0,
    }  # fmt: skip
    with pytest.raises(FrameError, match="n: must be between 1 and 16"):
        decode_to_worker(msgspec.msgpack.encode({"type": "plan", "step": 1, "new_rows": [row]}))


def test_deep_nesting_and_pickles_are_frame_errors() -> None:
    for payload in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000, pickle.dumps(StepPlan), b""):
        for decode in (decode_to_worker, decode_from_worker):
            with pytest.raises(FrameError):
                decode(payload)


@pytest.mark.parametrize(
    ("index", "part", "reason"),
    [
        (0, b"", "version"),
        (0, bytes([PROTOCOL_VERSION + 1]), "version"),
        (0, bytes([PROTOCOL_VERSION]) * 2, "version"),
        (1, b"\xff", "UTF-8"),
        (2, b"\xff", "UTF-8"),
        (1, b"x" * (MAX_ID_BYTES + 1), "at most 128"),
        (2, b"x" * (MAX_ID_BYTES + 1), "at most 128"),
        (3, b"\0" * 7, "8 bytes"),
        (4, b"\0" * 9, "8 bytes"),
        (5, b"\0" * (MAX_FRAME_BYTES + 1), "at most 67108864"),
    ],
)
def test_what_is_wrong_is_said(index: int, part: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        open_envelope([*GOOD[:index], part, *GOOD[index + 1 :]])


@pytest.mark.parametrize("parts", [GOOD[:5], [*GOOD, b""], []])
def test_the_number_of_parts_is_fixed(parts: list[bytes]) -> None:
    with pytest.raises(FrameError, match="6 parts"):
        open_envelope(parts)


def test_limits_are_inclusive() -> None:
    longest = "x" * MAX_ID_BYTES
    envelope = Envelope(longest, longest, 2**64 - 1, 2**64 - 1)
    assert open_envelope(encode(envelope, Drain()))[0] == envelope


@pytest.mark.parametrize(("payload", "is_hello"), [(b"\x81\xa4type\xa5hello", True), (b"\x81\xa4type\xa4beat", False),
                                                   (b"\x01", False), (b"\xc1", False), (b"", False)])  # fmt: skip
def test_a_frame_of_another_version_still_says_whose_it_is(payload: bytes, is_hello: bool) -> None:
    parts = [*encode(Envelope("", "w7", 0, 1, PROTOCOL_VERSION + 1), BeatAck())[:-1], payload]
    with pytest.raises(OtherVersionError) as raised:
        open_envelope(parts)
    assert (raised.value.version, raised.value.worker_id) == (PROTOCOL_VERSION + 1, "w7")
    assert raised.value.is_hello is is_hello
