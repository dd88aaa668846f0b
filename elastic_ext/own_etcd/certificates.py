"""The job's secret, and the certificates made from it: a host that has the secret is in.

Every host derives the same CA key and signs its own: nothing is handed around.

The name of the run goes into the CA key: jobs that share a secret are strangers to each other.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.own_etcd import folder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LEAST_BYTES = 16  # 128 bits, if they are random
MAX_BYTES = 1 << 16


def job_secret(variable: str | None, path: str | None, loopback: bool, own_folder: Path) -> bytes:
    """Return the job's secret.

    variable: the setting `job_secret`. path: the setting `job_secret_file`: made if it does not exist. All hosts end with the
    same content. loopback: the job is on this machine: then a file in own_folder, which only this user can read, will do.

    Raises UsageError if the job needs a secret and has no secret, or if the file cannot be used.
    """
    if variable is not None:
        return _long_enough(variable.encode(), "job_secret")
    if path is not None:
        return _long_enough(_read_or_make(Path(path)), f"job_secret_file={printable(path)}")
    check_unneeded(loopback)
    folder.make(own_folder)  # not before: a wrong command leaves nothing behind
    return _read_or_make(own_folder / "secret")


def check_unneeded(loopback: bool) -> None:
    """Raise UsageError for a job that has no secret, unless it is on this machine."""
    if loopback:
        return
    raise UsageError(
        "--rdzv-endpoint=job: with hosts of a network needs a secret, or anybody could read and write the job's etcd: give all "
        "hosts the same job_secret_file=PATH (it is created, if PATH is on a disk that they share) or ELASTIC_EXT_JOB_SECRET"
    )


def _long_enough(secret: bytes, what: str) -> bytes:
    if len(secret) < LEAST_BYTES:
        raise UsageError(f"{what}: {len(secret)} bytes; expected {LEAST_BYTES} or more, e.g. of `openssl rand -hex 32`")
    return secret


def _read_or_make(path: Path) -> bytes:
    try:
        while (found := _read(path)) is None:
            _make(path)
    except OSError as error:
        raise UsageError(f"job_secret_file={printable(str(path))} cannot be used: {error.strerror}") from error
    return found


def _read(path: Path) -> bytes | None:
    """Return the content; None if there is no such file. Raises UsageError if others may read it."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()), file.read(MAX_BYTES).strip()
    except FileNotFoundError:
        return None
    if mode.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(mode.st_mode) & 0o077:
        raise UsageError(
            f"job_secret_file={printable(str(path))}: others may read or own it; expected a file of this user with mode 0600: "
            "`chmod 600`, and a new secret if somebody has seen it"
        )
    return content


def _make(path: Path) -> None:
    """Make the file whole or not at all. A link is atomic on NFS, too: of several hosts one wins, and all read its file."""
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink(missing_ok=True)


CLOCKS = datetime.timedelta(days=1)  # hosts whose clocks differ by less accept each other's
LIFETIME = datetime.timedelta(days=400)  # longer than any job
CA_NAME = "elastic_ext job"
# The order of P-256 (SEC 2, secp256r1). 384 bits modulo it: no private key is noticeably more likely than another.
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
KEY_BYTES = 48


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of PEM files: the CA, this host's certificate (for servers and clients) and its key."""

    ca: str
    cert: str
    key: str


def write(secret: bytes, run_id: str, names: Iterable[str], folder: Path) -> CertificateFiles:
    """Write the files into a folder that only this user can read. names: host names and addresses of this host.

    Raises UsageError: the library `cryptography` is missing.
    """
    check_library()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ca_key = _ca_key(secret, run_id)
    ca = _certificate(CA_NAME, ca_key, ca_key, None)
    key = ec.generate_private_key(ec.SECP256R1())
    own = _certificate("elastic_ext host", key, ca_key, tuple(dict.fromkeys(names)))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = CertificateFiles(str(folder / "ca.pem"), str(folder / "own.pem"), str(folder / "own.key"))
    pem = serialization.Encoding.PEM
    for path, content in ((files.ca, ca.public_bytes(pem)), (files.cert, own.public_bytes(pem)), (files.key, private)):
        _write_private(path, content)
    return files


def name_of(secret: bytes, run_id: str) -> str:
    """Return a name of the job that only holders of its secret can make, and that does not show the secret."""
    return hashlib.sha256(b"elastic_ext job name\0" + secret + b"\0" + run_id.encode()).hexdigest()


def check_library() -> None:
    """Raise UsageError unless the library is there."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError("a job with a secret needs the library cryptography: `pip install 'elastic_ext[etcd]'`")


def _ca_key(secret: bytes, run_id: str) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"elastic_ext job etcd CA\0" + run_id.encode()).derive(secret)
    return ec.derive_private_key(int.from_bytes(derived, "big") % (ORDER - 1) + 1, ec.SECP256R1())


def _certificate(
    name: str, key: EllipticCurvePrivateKey, ca_key: EllipticCurvePrivateKey, hosts: tuple[str, ...] | None
) -> x509.Certificate:
    """hosts: of a host's certificate; None: that of the CA itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=0 if hosts is None else None), critical=True)
        .add_extension(_key_usage(ca=hosts is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if hosts is not None:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(usage, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _key_usage(ca: bool) -> x509.KeyUsage:
    """Python 3.13 and newer refuse a CA that does not say what its key is for (VERIFY_X509_STRICT)."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
