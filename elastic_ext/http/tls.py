"""TLS at the agent's pages, by three files as `start_http_server` of prometheus_client names them."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PemFiles:
    """Paths of PEM files. client_ca: the CA that signs clients' certificates; None: anyone may read."""

    cert: str
    key: str
    client_ca: str | None = None


class ServerTls:
    """What the server shows and demands. Not for two threads at once."""

    def __init__(self, files: PemFiles) -> None:
        """Raises UsageError if the files are wrong."""
        self._files = files
        self._stamps = _stamps(files)  # first: a file that changes meanwhile is read again
        self._context = _context(files)
        self.demands_certificates = files.client_ca is not None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Files that are wrong, as before a new key has come, are read when they change
        again; until then what was read before stays in force."""
        if (stamps := _stamps(self._files)) != self._stamps:
            self._stamps = stamps
            try:
                self._context = _context(self._files)
                logger.info("metrics: read %s again", self._files.cert)
            except UsageError as error:
                logger.warning("metrics: the certificates that were read before stay in force: %s", error)
        return self._context


def of_settings(settings: Settings) -> ServerTls | None:
    """Return what the settings ask for; None: plain HTTP. Raises UsageError if they are incomplete, or the files are wrong."""
    cert, key, client_ca = settings.metrics_certfile, settings.metrics_keyfile, settings.metrics_client_cafile
    if cert is not None and key is not None:
        return ServerTls(PemFiles(cert, key, client_ca))
    if cert is key is client_ca is None:
        return None
    missing = " and ".join(name for name, file in (("metrics_certfile", cert), ("metrics_keyfile", key)) if file is None)
    raise UsageError(f"{missing} not set: expected metrics_certfile and metrics_keyfile for TLS at the metrics endpoint")


def _stamps(files: PemFiles) -> tuple[tuple[int, int, int] | None, ...]:
    def stamp(file: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(file)  # of the target: Kubernetes replaces a symbolic link
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    return tuple(stamp(file) for file in (files.cert, files.key, files.client_ca) if file is not None)


def _context(files: PemFiles) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # by which a client could make the server compute at will
    seen = ""
    try:
        for name, file in (("certfile", files.cert), ("keyfile", files.key), ("client_cafile", files.client_ca)):
            if file is not None:
                seen = f"metrics_{name} {file}"
                open(file, "rb").close()  # the errors of ssl name no file
        seen = f"metrics_certfile {files.cert} with metrics_keyfile {files.key}"
        made.load_cert_chain(files.cert, files.key, password="")  # without one, OpenSSL would ask on the terminal
        if files.client_ca is not None:
            seen = f"metrics_client_cafile {files.client_ca}"
            made.load_verify_locations(files.client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"{seen}: {why}: expected PEM files, the key without a password") from error
    return made
