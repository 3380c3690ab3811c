"""`pagoda keygen DIR`: keys for a deployment whose tiers are on different hosts (see `pagoda_proto.keys`)."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pagoda_proto.keys import TLS_SERVER_NAME

_BACKDATED = timedelta(minutes=5)  # for clocks that are slightly behind


class _Term(NamedTuple):
    begin: datetime
    end: datetime


def generate(out: Path, valid_days: int = 825, now: datetime | None = None) -> list[Path]:
    """Write one directory per role and return the files. Refuses to overwrite an existing directory.

    The authority that signs the certificates expires with them and its key is not kept, so none can be added to a set.
    `now` defaults to the clock's time.

    Raises:
        FileExistsError: a role's directory exists already.
    """
    for role in ("engine-core", "gateway", "worker"):
        (out / role).mkdir(mode=0o700, parents=True)
    written = _write_curve(out)
    now = now or datetime.now(UTC)
    term = _Term(now - _BACKDATED, now + timedelta(days=valid_days))
    ca_key, ca = _authority(term)
    for role, name in (("engine-core", TLS_SERVER_NAME), ("gateway", "pagoda-gateway")):
        key, certificate = _certificate(name, ca_key, ca, term)
        written += [
            _write(out / role / "ca.crt", ca.public_bytes(serialization.Encoding.PEM)),
            _write(out / role / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM)),
            _write(out / role / "tls.key", _private_pem(key)),
        ]
    return written


def _write_curve(out: Path) -> list[Path]:
    engine_public, engine_secret = zmq.curve_keypair()
    worker_public, worker_secret = zmq.curve_keypair()
    return [
        _write(out / "engine-core" / "curve.public", engine_public),
        _write(out / "engine-core" / "curve.secret", engine_secret),
        _write(out / "engine-core" / "worker.public", worker_public),
        _write(out / "worker" / "curve.public", worker_public),
        _write(out / "worker" / "curve.secret", worker_secret),
        _write(out / "worker" / "engine-core.public", engine_public),
    ]


def _write(path: Path, content: bytes) -> Path:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, term: _Term) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(term.begin)
        .not_valid_after(term.end)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _authority(term: _Term) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"pagoda-ca {secrets.token_hex(8)}"  # distinguishes it from others in the same file
    builder = _builder(name, _name(name), key, term)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return key, builder.sign(key, hashes.SHA256())


def _certificate(
    name: str, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, term: _Term
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, ca.subject, key, term)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return key, builder.sign(ca_key, hashes.SHA256())
