"""Keys for links between hosts: one flat directory per role, as `pagoda keygen` writes it and a Secret mounts it.

    engine-core/   ca.crt tls.crt tls.key     curve.public curve.secret   worker*.public (the workers it admits)
    gateway/       ca.crt tls.crt tls.key
    worker/        curve.public curve.secret  engine-core.public

gRPC between gateway and engine core uses mutual TLS under its own CA: any peer with a certificate of a CA in `ca.crt`
(which may hold several) is admitted. ZMQ between engine core and worker uses CURVE (https://rfc.zeromq.org/spec/26/)
with an allowlist of public keys.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

DAY_S = 86_400.0
WARNED_S = 30 * DAY_S  # before certificates expire
TLS_SERVER_NAME = "pagoda-engine-core"  # in the engine core's certificate, whatever its address


class KeyFileError(ValueError):
    """A key directory lacks a file or holds one that is not a key; the message names it."""


class Term(NamedTuple):
    """The validity period of the certificates in `file`, in seconds since the epoch."""

    file: Path
    not_before: float
    not_after: float

    def problem(self, now: float) -> str | None:
        if now > self.not_after:
            return f"{self.file}: its certificate expired on {_date(self.not_after)}"
        if now < self.not_before:
            return f"{self.file}: its certificate is not valid before {_date(self.not_before)}"
        return None


class TlsKeys(NamedTuple):
    """PEM bytes. `term` is that of our own certificate, or of its authority if that expires sooner."""

    ca: bytes
    certificate: bytes
    private_key: bytes
    term: Term

    def warning(self, now: float) -> str | None:
        """A warning about their expiry; None while it is far off. `now` is in seconds since the epoch."""
        if now < self.term.not_after - WARNED_S:
            return None
        end = f"its certificate expires on {_date(self.term.not_after)}, after which no connection can be made"
        return self.term.problem(now) or f"{self.term.file}: {end}"

    async def tell_of_the_end(self, log: logging.Logger) -> None:
        """Log the warning, if there is one, at startup and then daily."""
        while True:
            if warning := self.warning(time.time()):
                log.warning("%s", warning)
            await asyncio.sleep(DAY_S)


class CurveKeys(NamedTuple):
    """Z85 text as bytes (40 characters). `peers`: public keys to admit (engine core) or to connect to (worker)."""

    public: bytes
    secret: bytes
    peers: tuple[bytes, ...]


def load_tls(keys_dir: str, now: float | None = None) -> TlsKeys:
    """`now`, in seconds since the epoch, defaults to the current time.

    Raises:
        KeyFileError: a file is missing, does not hold what its name says, is of another pair, or not valid now.
    """
    ca, certificate, private_key = (Path(keys_dir) / name for name in ("ca.crt", "tls.crt", "tls.key"))
    pem = _pem(ca), _pem(certificate), _pem(private_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for its errors, which gRPC would not report
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise KeyFileError(f"{ca} has no usable certificate: {error}") from error
    try:
        context.load_cert_chain(certificate, private_key, password="")  # or it prompts on the terminal
    except OSError as error:
        raise KeyFileError(f"{certificate} and {private_key} are not a usable pair: {error}") from error
    authorities, chain = _terms(ca, pem[0]), _terms(certificate, pem[1])
    now = time.time() if now is None else now
    good = [term for term in authorities if term.problem(now) is None]  # one of several is enough
    authority = max(good or authorities, key=lambda term: term.not_after)
    own = Term(certificate, max(term.not_before for term in chain), min(term.not_after for term in chain))
    for term in (own, authority):
        if problem := term.problem(now):
            raise KeyFileError(problem)
    return TlsKeys(*pem, min(own, authority, key=lambda term: term.not_after))


def load_curve(keys_dir: str, peers: str) -> CurveKeys:
    """`peers` is the glob of the other side's public keys: `worker*.public` or `engine-core.public`.

    Raises:
        KeyFileError: a key is missing or malformed, the secret is not that of `curve.public`, or no peer is named.
    """
    directory = Path(keys_dir)
    peer_files = sorted(directory.glob(peers))
    if not peer_files:
        raise KeyFileError(f"{directory} has no {peers}")
    peer_keys = tuple(_z85(path)[0] for path in peer_files)
    (public, _), (secret, its_public) = _z85(directory / "curve.public"), _z85(directory / "curve.secret")
    if its_public != public:
        raise KeyFileError(f"{directory / 'curve.public'} and {directory / 'curve.secret'} are not a pair")
    return CurveKeys(public, secret, peer_keys)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error


def _pem(path: Path) -> bytes:
    content = _read(path)
    if b"-----BEGIN " not in content:
        raise KeyFileError(f"{path} is not PEM")
    return content


def _date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _terms(path: Path, pem: bytes) -> list[Term]:
    """The validity periods of all certificates in a file that TLS could read."""
    blocks = re.findall(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        terms = [Term(path, *_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii")))) for block in blocks]
    except (ValueError, IndexError) as error:
        raise KeyFileError(f"{path} has a certificate whose expiry cannot be read") from error
    if not terms:
        raise KeyFileError(f"{path} has no BEGIN CERTIFICATE")
    return terms


_VERSION, _UTC_TIME = 0xA0, 0x17  # tags


def _validity(der: bytes) -> tuple[float, float]:
    """The validity period of a certificate (RFC 5280), which the TLS library reports only for a peer's. Raises
    ValueError or IndexError if it is not a certificate."""
    certificate = _parts(der)[0][1]
    fields = [content for tag, content in _parts(_parts(certificate)[0][1]) if tag != _VERSION]
    _serial, _algorithm, _issuer, validity = fields[:4]
    begin, end = (_instant(tag, content.decode("ascii")) for tag, content in _parts(validity))
    return begin, end


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of consecutive DER values."""

    def walk() -> Iterator[tuple[int, bytes]]:
        at = 0
        while at < len(der):
            tag, length, at = der[at], der[at + 1], at + 2
            if length >= 0x80:  # the length is in this many bytes
                width = length & 0x7F
                length, at = int.from_bytes(der[at : at + width], "big"), at + width
            yield tag, der[at : at + length]
            at += length

    return list(walk())


def _instant(tag: int, text: str) -> float:
    """Parse a time. A two-digit year means 1950 to 2049."""
    century = "" if tag != _UTC_TIME else "19" if text >= "50" else "20"
    return datetime.strptime(century + text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _z85(path: Path) -> tuple[bytes, bytes]:
    """The key, and the public key that belongs to it if it is a secret one."""
    import zmq  # here, as gateways have no CURVE keys and should not load it

    content = _read(path).strip()
    if len(content) != 40:
        raise KeyFileError(f"{path} is not a CURVE key: 40 characters expected, got {len(content)}")
    try:
        return content, zmq.curve_public(content)
    except zmq.ZMQError as error:  # libzmq itself checks, so it accepts what passes here
        raise KeyFileError(f"{path} is not a CURVE key: its 40 characters are not Z85") from error
