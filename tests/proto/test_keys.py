"""The validity period of certificates is read from their files, and keys outside their period are refused."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pagoda.tools.keygen import generate
from pagoda_proto import keys
from pagoda_proto.keys import DAY_S, WARNED_S, KeyFileError, load_tls

NOW = datetime(2030, 1, 1, tzinfo=UTC)
AT = NOW.timestamp()
DAYS = 100
END = AT + DAYS * DAY_S
KEY = ec.generate_private_key(ec.SECP256R1())


def signed(begin: datetime, end: datetime, names: int = 1) -> bytes:
    """PEM of a self-signed certificate; many names make it long."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ca")])
    alternatives = x509.SubjectAlternativeName([x509.DNSName(f"name-{number}") for number in range(names)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(alternatives, critical=False).sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


def write(directory: Path, ca: bytes, chain: bytes) -> str:
    (directory / "ca.crt").write_bytes(ca)
    (directory / "tls.crt").write_bytes(chain)
    (directory / "tls.key").write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(directory)


@pytest.mark.parametrize("names", [1, 20, 5000])
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (datetime(1950, 1, 1), datetime(1999, 12, 31, 23, 59, 59)),
        (datetime(2000, 1, 1), datetime(2049, 12, 31, 23, 59, 59)),
        (datetime(2049, 12, 31), datetime(2050, 1, 1)),
        (datetime(2051, 2, 3, 4, 5, 6), datetime(9999, 12, 31, 23, 59, 59)),
    ],
)
def test_a_term_is_that_of_the_certificate(begin: datetime, end: datetime, names: int, tmp_path: Path) -> None:
    begin, end = begin.replace(tzinfo=UTC), end.replace(tzinfo=UTC)
    certificate = signed(begin, end, names)
    term = load_tls(write(tmp_path, certificate, certificate), begin.timestamp()).term
    assert (term.not_before, term.not_after) == (begin.timestamp(), end.timestamp())


@pytest.fixture
def gateway(tmp_path: Path) -> str:
    generate(tmp_path, DAYS, now=NOW)
    return str(tmp_path / "gateway")


def test_keys_are_refused_before_and_after_their_time_by_file_and_date(gateway: str) -> None:
    for now in (AT, END):
        assert load_tls(gateway, now).term.not_after == END
    with pytest.raises(KeyFileError, match=r"gateway/tls\.crt: its certificate expired on 2030-04-11 00:00 UTC"):
        load_tls(gateway, END + 1)
    with pytest.raises(KeyFileError, match=r"gateway/tls\.crt: .* is not valid before 2029-12-31 23:55 UTC"):
        load_tls(gateway, AT - 3600)


def test_of_several_authorities_one_that_holds_is_enough(tmp_path: Path) -> None:
    old, new = signed(NOW - timedelta(days=9), NOW), signed(NOW, NOW + timedelta(days=9))
    keys_dir = write(tmp_path, old + new, new)
    assert load_tls(keys_dir, AT + DAY_S).term.not_after == AT + 9 * DAY_S
    write(tmp_path, old, new)
    with pytest.raises(KeyFileError, match=r"ca\.crt: its certificate expired on 2030-01-01"):
        load_tls(keys_dir, AT + DAY_S)


def test_what_ends_first_is_the_end(tmp_path: Path) -> None:
    short, long = signed(NOW, NOW + timedelta(days=5)), signed(NOW, NOW + timedelta(days=9))
    term = load_tls(write(tmp_path, short, long), AT).term
    assert (term.file.name, term.not_after) == ("ca.crt", AT + 5 * DAY_S)
    term = load_tls(write(tmp_path, long, long + short), AT).term  # a chain holds as long as every part of it
    assert (term.file.name, term.not_after) == ("tls.crt", AT + 5 * DAY_S)


def test_a_warning_comes_a_month_before_the_end_and_goes_on_behind_it(gateway: str) -> None:
    keys = load_tls(gateway, AT)
    assert keys.warning(END - WARNED_S - 1) is None
    assert "gateway/tls.crt: its certificate expires on 2030-04-11 00:00 UTC" in (keys.warning(END - WARNED_S) or "")
    assert "expired on 2030-04-11" in (keys.warning(END + 1) or "")


async def test_an_end_that_is_near_is_told_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tmp_path, 29)
    monkeypatch.setattr(keys, "DAY_S", 0.0)
    telling = asyncio.create_task(load_tls(str(tmp_path / "gateway")).tell_of_the_end(logging.getLogger("tier")))
    async with asyncio.timeout(60):
        while len(caplog.records) < 3:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0)
    telling.cancel()
    assert {"its certificate expires on" in record.getMessage() for record in caplog.records} == {True}
