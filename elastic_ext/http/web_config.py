"""Reads `metrics_web_config`: TLS and users of the agent's HTTP server, in the format of Prometheus' exporter-toolkit.

https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md says what the keys mean. What this server
does not know is an error, never ignored: somebody relies on it.
"""

from __future__ import annotations

import importlib
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from elastic_ext.base.errors import UsageError
from elastic_ext.base.files import read_text

EXTRA = "elastic_ext[web]"
MAX_BYTES = 1 << 20
MAX_COST = 14  # of bcrypt: a second or so per check; each further one doubles it, and a client waits no longer than 10 s

# Python's ssl cannot ask for a certificate without verifying it; exporter-toolkit calls those types insecure.
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
KEYS = ("tls_server_config", "basic_auth_users")
TLS_KEYS = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Tls:
    """Files are absolute, or relative to the working directory."""

    cert_file: str
    key_file: str
    client_ca_file: str | None
    client_auth: ssl.VerifyMode
    min_version: ssl.TLSVersion
    max_version: ssl.TLSVersion

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca_file)))


@dataclass(frozen=True)
class WebConfig:
    """tls: None: plain HTTP. users: bcrypt hashes by name; empty: no password is asked for."""

    tls: Tls | None
    users: Mapping[str, bytes]


class _Wrong(ValueError):
    """What is wrong with the file, and what to do."""


def read(path: str) -> WebConfig:
    """Read a file.

    Raises:
        UsageError: it cannot be read, holds something that this server does not know, or a library for it is absent.
    """
    yaml = library("yaml", "PyYAML", path)
    try:
        content = read_text(path, MAX_BYTES)
        _refuse_twice(yaml.compose(content, Loader=yaml.SafeLoader))
        config = _config(yaml.safe_load(content), os.path.dirname(path))
    except yaml.YAMLError as error:
        # Not its own text, which shows what stands there: it may be a hash.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark is not None else ""
        raise UsageError(f"metrics_web_config {path}: expected YAML{where}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"metrics_web_config {path}: {error}") from error
    if config.users:
        library("bcrypt", "bcrypt", path)
    return config


def library(module: str, package: str, path: str) -> ModuleType:
    """Return a module of the extra. Raises UsageError, which names the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{package} is not installed ({error}): pip install '{EXTRA}'"
        raise UsageError(f"metrics_web_config {path}: {what}") from error


def context(tls: Tls, path: str) -> ssl.SSLContext:
    """Return what the server shows and demands. Raises UsageError if a certificate or key cannot be used."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version, made.maximum_version = tls.min_version, tls.max_version
    made.options |= ssl.OP_NO_RENEGOTIATION  # by which a client could make the server compute at will
    seen = tls.cert_file
    try:
        for seen in tls.files:
            open(seen, "rb").close()  # the errors of ssl name no file
        seen = f"{tls.cert_file} with {tls.key_file}"
        made.load_cert_chain(tls.cert_file, tls.key_file, password="")  # without one, OpenSSL would ask on the terminal
        if tls.client_ca_file is not None:
            seen = tls.client_ca_file
            made.load_verify_locations(tls.client_ca_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"metrics_web_config {path}: {seen}: {why}: expected PEM files, the key without a password") from error
    made.verify_mode = tls.client_auth
    return made


def _config(document: object, folder: str) -> WebConfig:
    top = _section("the file", {} if document is None else document, KEYS)
    tls = top.get("tls_server_config")
    users = top.get("basic_auth_users")
    return WebConfig(
        None if tls is None else _tls(_section("tls_server_config", tls, TLS_KEYS), folder),
        {} if users is None else dict(_users(users)),
    )


def _section(name: str, value: object, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _Wrong(f"{name} is {type(value).__name__}, expected {', '.join(known)}")
    for key in value:
        if key not in known:
            raise _Wrong(f"{name} has {key!r}, which this server does not support: expected {', '.join(known)}; remove it")
    return value


def _tls(section: Mapping[str, object], folder: str) -> Tls:
    def choice(key: str, default: str, values: Mapping[str, _Value]) -> _Value:
        return _one_of(key, section.get(key, default), values)

    def file(key: str) -> str | None:
        name = section.get(key)
        if name is not None and not (isinstance(name, str) and name):
            raise _Wrong(f"tls_server_config.{key} is {name!r}, expected the name of a file")
        return None if name is None else os.path.join(folder, str(name))

    certificate, key = _needed(file, "cert_file"), _needed(file, "key_file")
    ca, client_auth = file("client_ca_file"), choice("client_auth_type", "NoClientCert", CLIENT_AUTH)
    if (ca is None) != (client_auth is ssl.CERT_NONE):
        wrong = "client_auth_type without client_ca_file" if ca is None else "client_ca_file without client_auth_type"
        raise _Wrong(f"tls_server_config has {wrong}: expected both (client_auth_type: RequireAndVerifyClientCert), or neither")
    lowest, highest = choice("min_version", "TLS12", VERSIONS), choice("max_version", "TLS13", VERSIONS)
    if lowest > highest:
        raise _Wrong("tls_server_config: min_version is above max_version")
    return Tls(certificate, key, ca, client_auth, lowest, highest)


def _needed(file: Callable[[str], str | None], key: str) -> str:
    name = file(key)
    if name is None:
        raise _Wrong(f"tls_server_config has no {key}: expected cert_file and key_file")
    return name


def _one_of(key: str, value: object, values: Mapping[str, _Value]) -> _Value:
    if not isinstance(value, str) or value not in values:
        raise _Wrong(f"tls_server_config.{key} is {value!r}, expected one of {', '.join(values)}")
    return values[value]


def _users(section: object) -> Iterator[tuple[str, bytes]]:
    """The messages hold no hash: the log has more readers than the file."""
    if not isinstance(section, dict):
        raise _Wrong(f"basic_auth_users is {type(section).__name__}, expected names with bcrypt hashes")
    for user, hashed in section.items():
        if not isinstance(user, str) or ":" in user:
            raise _Wrong(f"basic_auth_users has {user!r}, expected a name without a colon; quote it")
        found = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if found is None:
            raise _Wrong(f"basic_auth_users.{user} is no bcrypt hash ($2y$10$...): make one with `htpasswd -nBC 10 {user}`")
        if not 4 <= int(found["cost"]) <= MAX_COST:
            raise _Wrong(f"basic_auth_users.{user} has bcrypt's cost {found['cost']}, expected 4 to {MAX_COST}")
        yield user, hashed.encode()


def _refuse_twice(node: object) -> None:
    """PyYAML takes the last of two equal keys, and forgets the users of the first. node: of yaml.compose."""
    value = getattr(node, "value", None)
    if not isinstance(value, list):
        return
    pairs = [each for each in value if isinstance(each, tuple)]
    names = [str(key.value) for key, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _Wrong(f"{name!r} is there twice: keep one")
    for _, below in pairs:
        _refuse_twice(below)
