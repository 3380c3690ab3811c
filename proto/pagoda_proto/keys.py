"""Keys for links that leave the host, one flat directory per role, as `pagoda keygen` writes and a Secret mounts them.

    engine-core/   ca.crt tls.crt tls.key     curve.public curve.secret   worker*.public (the workers it admits)
    gateway/       ca.crt tls.crt tls.key
    worker/        curve.public curve.secret  engine-core.public

gRPC between gateway and engine core is mutual TLS under a CA of its own: whoever holds a certificate of that CA is let
in. ZMQ between engine core and worker is CURVE (https://rfc.zeromq.org/spec/26/) with an allowlist of public keys.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

TLS_SERVER_NAME = "pagoda-engine-core"  # the name in the engine core's certificate, whatever address it has


class KeyFileError(ValueError):
    """A key directory lacks a file or holds one that is not a key; the message names it."""


class TlsKeys(NamedTuple):
    """PEM bytes."""

    ca: bytes
    certificate: bytes
    private_key: bytes


class CurveKeys(NamedTuple):
    """Z85 text as bytes (40 characters). `peers`: public keys to admit (engine core) or to connect to (worker)."""

    public: bytes
    secret: bytes
    peers: tuple[bytes, ...]


def load_tls(keys_dir: str) -> TlsKeys:
    """Raises KeyFileError when a file is missing, does not hold what its name says, or is of another pair."""
    ca, certificate, private_key = (Path(keys_dir) / name for name in ("ca.crt", "tls.crt", "tls.key"))
    keys = TlsKeys(_pem(ca), _pem(certificate), _pem(private_key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # what it says of them gRPC would not
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise KeyFileError(f"{ca} holds no certificate that can be used: {error}") from error
    try:
        context.load_cert_chain(certificate, private_key, password="")  # else it asks a terminal
    except OSError as error:
        raise KeyFileError(f"{certificate} and {private_key} are no pair that can be used: {error}") from error
    return keys


def load_curve(keys_dir: str, peers: str) -> CurveKeys:
    """`peers` is the glob of the other side's public keys: `worker*.public` or `engine-core.public`.

    Raises:
        KeyFileError: a key is missing or malformed, the secret is not that of `curve.public`, or no peer is named.
    """
    directory = Path(keys_dir)
    peer_files = sorted(directory.glob(peers))
    if not peer_files:
        raise KeyFileError(f"{directory} holds no {peers}")
    peer_keys = tuple(_z85(path)[0] for path in peer_files)
    (public, _), (secret, its_public) = _z85(directory / "curve.public"), _z85(directory / "curve.secret")
    if its_public != public:
        raise KeyFileError(f"{directory / 'curve.public'} and {directory / 'curve.secret'} are no pair")
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


def _z85(path: Path) -> tuple[bytes, bytes]:
    """The key, and the public one that belongs to it if it is a secret one."""
    import zmq  # not where gateways would load it, who have none

    content = _read(path).strip()
    if len(content) != 40:
        raise KeyFileError(f"{path} is not a CURVE key: 40 characters expected, got {len(content)}")
    try:
        return content, zmq.curve_public(content)
    except zmq.ZMQError as error:  # from the one who is going to take it, so it takes what passes here
        raise KeyFileError(f"{path} is not a CURVE key: its 40 characters are not Z85") from error
