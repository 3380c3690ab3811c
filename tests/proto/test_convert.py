from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor, OneofDescriptor
from grpc_tools import protoc
from hypothesis import given
from tests.fakes import make_delta
from tests.proto.strategies import DELTAS, LOADS, PRIORS, RECORDS, RESUMES, sampling_params

from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, InvalidParams
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import (
    Begun,
    Delta,
    FinishReason,
    Generate,
    LedgerEntry,
    Load,
    Pool,
    Pooled,
    PriorOutput,
    RequestRecord,
    Resume,
    Tokens,
    Usage,
)
from pagoda_proto.steps import TopLogprobs

PAIRS = [
    (SamplingParams, pb.SamplingParams),
    (RequestRecord, pb.RequestRecord),
    (Generate, pb.Generate),
    (PoolingParams, pb.Pool),
    (Pooled, pb.Pooled),
    (PriorOutput, pb.PriorOutput),
    (Begun, pb.Begun),
    (Resume, pb.Resume),
    (Delta, pb.Delta),
    (Tokens, pb.Tokens),
    (TopLogprobs, pb.TopLogprobs),
    (Usage, pb.Usage),
    (LedgerEntry, pb.LedgerEntry),
    (Load, pb.Load),
]
STRANGE_ARM = bytes([15 << 3 | 2, 0])  # an empty message in a field that no message has
TEXT_ONLY = {"stop", "include_stop_str_in_output", "skip_special_tokens"}  # never leave the text side
ARMS = {"task": Generate | Pool, "result": Tokens | Pooled}  # by oneof, which is one field of our struct


@pytest.mark.parametrize(("struct", "message"), PAIRS, ids=[struct.__name__ for struct, _ in PAIRS])
def test_every_field_exists_on_both_sides(struct: type[msgspec.Struct], message: type) -> None:
    fields = message.DESCRIPTOR.fields  # type: ignore[attr-defined]
    there = {oneof.name if (oneof := _own_oneof(field)) else field.name for field in fields}
    here = set(struct.__struct_fields__)
    if struct is SamplingParams:
        assert here >= TEXT_ONLY
        here -= TEXT_ONLY
    assert here == there


def _own_oneof(field: FieldDescriptor) -> OneofDescriptor | None:
    """The field's oneof, unless it is the synthetic one that protoc adds for an optional field."""
    oneof = field.containing_oneof
    return None if oneof is None or oneof.name.startswith("_") else oneof


@pytest.mark.parametrize("message", [pb.RequestRecord, pb.Delta], ids=["task", "result"])
def test_every_arm_is_a_struct(message: type) -> None:
    (oneof,) = message.DESCRIPTOR.oneofs  # type: ignore[attr-defined]
    arms = {field.message_type.name for field in oneof.fields}
    assert arms == {struct.__name__ for struct in (get_args(ARMS[oneof.name]) or (ARMS[oneof.name],))}


def test_finish_reasons_match_one_to_one() -> None:
    assert len(pb.FinishReason.keys()) == len(FinishReason) + 1
    for reason in FinishReason:
        delta = make_delta(finish_reason=reason)
        assert convert.delta_to_pb(delta).finish_reason == pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")


@given(sampling_params())
def test_params_round_trip(params: SamplingParams) -> None:
    wire = convert.params_to_pb(params).SerializeToString()
    assert convert.params_from_pb(pb.SamplingParams.FromString(wire)) == params


@given(RECORDS)
def test_record_round_trip(record: RequestRecord) -> None:
    wire = convert.record_to_pb(record).SerializeToString()
    assert convert.record_from_pb(pb.RequestRecord.FromString(wire)) == record


@given(PRIORS)
def test_prior_round_trip(prior: PriorOutput) -> None:
    wire = convert.prior_to_pb(prior).SerializeToString()
    assert convert.prior_from_pb(pb.PriorOutput.FromString(wire)) == prior


@given(RESUMES)
def test_resume_round_trip(resume: Resume) -> None:
    wire = convert.resume_to_pb(resume).SerializeToString()
    assert convert.resume_from_pb(pb.Resume.FromString(wire)) == resume


@given(DELTAS)
def test_delta_round_trip(delta: Delta) -> None:
    wire = convert.delta_to_pb(delta).SerializeToString()
    assert convert.delta_from_pb(pb.Delta.FromString(wire)) == delta


@given(LOADS)
def test_load_round_trip(load: Load) -> None:
    wire = convert.load_to_pb(load).SerializeToString()
    assert convert.load_from_pb(pb.Load.FromString(wire)) == load


def test_the_delta_that_ends_a_request_still_ends_it_when_nothing_was_counted() -> None:
    delta = make_delta(usage=Usage(prompt_tokens=0))
    assert convert.delta_from_pb(convert.delta_to_pb(delta)).ends_request


def test_text_only_fields_never_leave() -> None:
    params = SamplingParams(stop=("end",), include_stop_str_in_output=True, skip_special_tokens=False)
    assert convert.params_from_pb(convert.params_to_pb(params)) == SamplingParams()


def test_absent_fields_have_the_defaults_of_the_struct() -> None:
    assert convert.params_from_pb(pb.SamplingParams()) == SamplingParams()


def test_inbound_values_are_validated_all_at_once() -> None:
    with pytest.raises(InvalidParams) as caught:
        convert.params_from_pb(pb.SamplingParams(n=0, top_p=3.0, logprobs=21))
    assert [problem.param for problem in caught.value.problems] == ["n", "top_p", "logprobs"]
    with pytest.raises(InvalidParams):
        convert.record_from_pb(pb.RequestRecord(generate=pb.Generate(params=pb.SamplingParams(temperature=-1))))


def test_the_committed_code_was_generated_from_the_committed_proto(tmp_path, pytestconfig) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "engine.binpb"
    name = pb.DESCRIPTOR.name
    root = pytestconfig.rootpath / "proto"
    assert protoc.main(["protoc", f"-I{root}", f"--descriptor_set_out={output}", str(root / name)]) == 0
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert _without_json_names(compiled) == _without_json_names(committed)


def _without_json_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Only some ways to obtain a descriptor fill in json_name, which follows from the field's name."""

    def clear(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            clear(nested)

    for message in file.message_type:
        clear(message)
    return file


def test_words_of_another_version_are_an_error_of_their_request_alone() -> None:
    message = convert.delta_to_pb(make_delta(0, [1]))
    message.error_code = "a_code_of_the_future"
    assert convert.delta_from_pb(message).error_code is ErrorCode.INTERNAL
    message.error_code = ""
    message.finish_reason = 77  # type: ignore[assignment]
    delta = convert.delta_from_pb(message)
    assert (delta.finish_reason, delta.error_code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    strange = pb.Delta.FromString(pb.Delta(request_id="r").SerializeToString() + STRANGE_ARM)
    delta = convert.delta_from_pb(strange)
    assert (delta.finish_reason, delta.error_code) == (FinishReason.ERROR, ErrorCode.INTERNAL)


@pytest.mark.parametrize(("more", "told"), [(b"", "none"), (STRANGE_ARM, "field 15")])
def test_a_record_without_a_task_known_here_is_refused_by_name(more: bytes, told: str) -> None:
    record = pb.RequestRecord.FromString(pb.RequestRecord(request_id="r", priority=3).SerializeToString() + more)
    with pytest.raises(InvalidParams, match=f"task: must be one of generate, pool; the record has {told}") as caught:
        convert.record_from_pb(record)
    assert caught.value.param == "task"


def test_under_what_a_request_began_travels_with_its_first_tokens() -> None:
    begun = Begun(model_fingerprint="m", numerics_id="n", cached_prompt_tokens=16)
    delta = make_delta(0, [1], begun=begun)
    assert convert.delta_from_pb(convert.delta_to_pb(delta)).result.begun == begun
    delta.result.begun = None
    assert convert.delta_from_pb(convert.delta_to_pb(delta)).result.begun is None
