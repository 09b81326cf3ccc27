"""An authority of its own for each test, and certificates of it for etcd and its clients."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = dt.timedelta(days=1)


class Certificate(msgspec.Struct, frozen=True):
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Certificates(msgspec.Struct, frozen=True):
    """What one authority has issued."""

    ca: Path
    server: Certificate
    client: Certificate


def make_certificates(folder: Path) -> Certificates:
    """An authority that is known nowhere, and what both ends need."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
    authority = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca = folder / "ca.pem"
    ca.write_bytes(authority.public_bytes(Encoding.PEM))
    return Certificates(
        ca, *(_issue(folder, each, authority, key) for each in ("server", "client"))
    )


def _issue(
    folder: Path, name: str, authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey
) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    # etcd's JSON pages dial etcd itself, with the server's certificate.
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(subject, authority.subject, key)
        .add_extension(here, critical=False)
        .add_extension(uses, critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
    files.key.touch(mode=0o600)
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.key.write_bytes(plain)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
