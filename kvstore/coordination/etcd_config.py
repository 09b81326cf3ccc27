"""Section [etcd] of the configuration: where etcd is, and how a master proves who it is."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import msgspec

from kvstore.config_values import Seconds
from kvstore.errors import BadValue, ConfigError
from kvstore.private_file import read_private
from kvstore.rpc.address import TcpAddress

ETCD_PORT: Final = 2379
ENDPOINTS_MAX: Final = 16
TIMEOUT_MIN_S: Final = 0.05
TIMEOUT_MAX_S: Final = 30.0


class TlsFiles(msgspec.Struct, frozen=True):
    """What the files hold: the authority that etcd's certificates are of, and our own if asked."""

    ca: bytes
    cert: bytes | None
    key: bytes | None


class EtcdConfig(msgspec.Struct, frozen=True):
    """How masters reach etcd. Nobody else does."""

    endpoints: tuple[TcpAddress, ...] = (TcpAddress("127.0.0.1", ETCD_PORT),)
    """One is used at a time; the next in turn when it fails."""
    user: str | None = None
    """Needs readwrite on the prefix /kvharbor/<cluster>/."""
    password_file: Path | None = None
    ca_file: Path | None = None
    """With it connections are TLS."""
    cert_file: Path | None = None
    key_file: Path | None = None
    """Ours, where etcd asks its clients for a certificate."""
    owned: bool = False
    """Nobody else uses this etcd: the leader then keeps its history short."""
    timeout_s: Seconds = Seconds(1.0)
    """For each call."""

    def __post_init__(self) -> None:
        """Raise BadValue where a bound is passed, or a value needs another one."""
        if not 1 <= len(self.endpoints) <= ENDPOINTS_MAX:
            raise BadValue("endpoints", len(self.endpoints), f"1 to {ENDPOINTS_MAX} of them")
        if len(set(self.endpoints)) < len(self.endpoints):
            raise BadValue("endpoints", [str(each) for each in self.endpoints], "each once")
        for each in self.endpoints:
            if each.port == 0:
                raise BadValue("endpoints", str(each), "a port of 1 to 65535")
        if not TIMEOUT_MIN_S <= self.timeout_s <= TIMEOUT_MAX_S:
            raise BadValue("timeout_s", self.timeout_s, f"{TIMEOUT_MIN_S} to {TIMEOUT_MAX_S}")
        self._require("user", "password_file")
        self._require("password_file", "user")
        self._require("cert_file", "key_file")
        self._require("key_file", "cert_file")
        self._require("cert_file", "ca_file")

    def _require(self, name: str, other: str) -> None:
        if getattr(self, name) is not None and getattr(self, other) is None:
            raise BadValue(name, str(getattr(self, name)), f"{other} beside it")

    def password(self) -> str:
        """The password of `user`; ConfigError when there is none that can be used."""
        assert self.password_file is not None, "it is there when `user` is"
        content = read_private(self.password_file, "password")
        try:
            password = content.decode()
        except UnicodeDecodeError:
            password = ""
        if not password:
            raise ConfigError(f"password file {self.password_file}: want text of one line")
        return password

    def tls(self) -> TlsFiles | None:
        """What TLS needs, read now; None for plain connections. ConfigError names a bad file."""
        if self.ca_file is None:
            return None
        cert = None if self.cert_file is None else _pem(self.cert_file, "cert_file")
        key = None if self.key_file is None else read_private(self.key_file, "key")
        found = TlsFiles(_pem(self.ca_file, "ca_file"), cert, key)
        self._try_tls()
        return found

    def _try_tls(self) -> None:
        """ConfigError where TLS could not begin with these files: the client of etcd would not say
        so, only never connect.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"ca_file {self.ca_file}: not usable: {_said(error)}") from error
        if self.cert_file is not None:
            pair = f"cert_file {self.cert_file} with key_file {self.key_file}"
            try:
                # None would have it ask the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(f"{pair}: not usable: {_said(error)}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted, want one without a password")


def _said(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or str(error)).replace("_", " ").lower()


def _pem(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError(f"{what} {path}: holds no certificate in PEM form")
    return content
