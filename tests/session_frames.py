"""Reads the frames of a session as a sequence of deltas."""

from __future__ import annotations

from pagoda_proto import convert
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.records import Delta, Tokens


class FrameReader:
    """Remembers which request each stream number belongs to, for up to `MAX_CHOICES` choices of a request."""

    MAX_CHOICES = 16

    def __init__(self) -> None:
        self._streams: dict[int, tuple[str, int, int]] = {}

    def deltas(self, frame: pb.ServerFrame) -> list[Delta]:
        """The deltas of a frame, in order."""
        if frame.HasField("accepted"):
            accepted = frame.accepted
            for choice in range(self.MAX_CHOICES):
                self._streams[accepted.stream + choice] = (accepted.request_id, accepted.attempt, choice)
        tokens = frame.outputs.tokens
        columns = zip(tokens.streams, tokens.first_indexes, tokens.token_ids, strict=True)
        deltas = [self._delta(*entry) for entry in columns]
        return deltas + [convert.delta_from_pb(delta) for delta in frame.outputs.deltas]

    def _delta(self, stream: int, first_index: int, token_id: int) -> Delta:
        request_id, attempt, choice = self._streams[stream]
        tokens = Tokens(first_index=first_index, token_ids=[token_id])
        return Delta(request_id=request_id, attempt=attempt, choice=choice, result=tokens)
