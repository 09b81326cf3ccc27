"""Section [etcd]: what may be written there, and the files that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvstore.config import Sources
from kvstore.coordination.etcd_config import EtcdConfig, TlsFiles
from kvstore.errors import ConfigError
from kvstore.rpc.address import TcpAddress
from tests.etcd_certificates import make_certificates

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE = b"-----BEGIN CERTIFICATE-----\n...\n"


def section(**table: object) -> EtcdConfig:
    return Sources(tables={"etcd": table}).section(EtcdConfig, "etcd")


def test_all_of_it_is_read(tmp_path: Path) -> None:
    config = section(
        endpoints=["10.0.0.1:2379", "[::1]:2380", "etcd:2379"],
        user="kvharbor",
        password_file=str(tmp_path / "password"),
        ca_file=str(tmp_path / "ca"),
        cert_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        owned=True,
        timeout_s=0.5,
    )
    assert config.endpoints[1:] == (TcpAddress("::1", 2380), TcpAddress("etcd", 2379))
    assert config.owned
    assert config.timeout_s == 0.5


def test_nothing_of_it_is_needed() -> None:
    config = section()
    assert config.endpoints == (TcpAddress("127.0.0.1", 2379),)
    assert config.tls() is None
    assert not config.owned


@pytest.mark.parametrize(
    ("table", "want"),
    [
        ({"endpoints": []}, "endpoints: got 0, want 1 to 16"),
        ({"endpoints": ["a:1", "a:1"]}, "want each once"),
        ({"endpoints": ["a:0"]}, "want a port of 1 to 65535"),
        ({"endpoints": ["http://a:2379"]}, "want host:port"),
        ({"user": "u"}, "user: got 'u', want password_file beside it"),
        ({"password_file": "/p"}, "want user beside it"),
        ({"key_file": "/k"}, "want cert_file beside it"),
        ({"cert_file": "/c"}, "want key_file beside it"),
        ({"cert_file": "/c", "key_file": "/k"}, "want ca_file beside it"),
        ({"timeout_s": 0.01}, "timeout_s: got 0.01, want 0.05 to 30"),
        ({"timeout_s": 31}, "want 0.05 to 30"),
        ({"endpoint": ["a:1"]}, "did you mean endpoints"),
    ],
)
def test_what_cannot_be_meant_is_refused(table: dict[str, object], want: str) -> None:
    with pytest.raises(ConfigError, match=want):
        section(**table)


def private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_password_is_one_line_that_others_cannot_read(tmp_path: Path) -> None:
    path = private(tmp_path / "p", b"correct horse\n")
    config = EtcdConfig(user="u", password_file=path)
    assert config.password() == "correct horse"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"password file .*: mode 0640 lets others read it"):
        config.password()


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_password_is_text(tmp_path: Path, content: bytes) -> None:
    config = EtcdConfig(user="u", password_file=private(tmp_path / "p", content))
    with pytest.raises(ConfigError, match="want text of one line"):
        config.password()


def test_files_of_tls_are_read_when_they_are_needed(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    config = EtcdConfig(ca_file=ca)
    with pytest.raises(ConfigError, match=r"ca_file .*: cannot be read: No such file"):
        config.tls()
    ca.write_bytes(b"no certificate")
    with pytest.raises(ConfigError, match=r"ca_file .*: holds no certificate in PEM form"):
        config.tls()
    ca.write_bytes(CERTIFICATE)
    with pytest.raises(ConfigError, match=r"ca_file .*: not usable: "):
        config.tls()
    made = make_certificates(tmp_path)
    ca, cert, key = (
        made.ca,
        made.client.cert,
        private(made.client.key, made.client.key.read_bytes()),
    )
    assert EtcdConfig(ca_file=ca).tls() == TlsFiles(ca.read_bytes(), None, None)
    config = EtcdConfig(ca_file=ca, cert_file=cert, key_file=key)
    assert config.tls() == TlsFiles(ca.read_bytes(), cert.read_bytes(), key.read_bytes().strip())
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"key file .*: mode 0644 lets others read it"):
        config.tls()


def test_a_key_that_does_not_fit_its_certificate_is_named(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    other = private(made.server.key, made.server.key.read_bytes())
    config = EtcdConfig(ca_file=made.ca, cert_file=made.client.cert, key_file=other)
    want = f"cert_file {made.client.cert} with key_file {other}: not usable: key values mismatch"
    with pytest.raises(ConfigError, match=want):
        config.tls()


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    key = load_pem_private_key(made.client.key.read_bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a password")
    )
    file = private(tmp_path / "locked", locked)
    config = EtcdConfig(ca_file=made.ca, cert_file=made.client.cert, key_file=file)
    with pytest.raises(ConfigError, match="the key is encrypted, want one without a password"):
        config.tls()
