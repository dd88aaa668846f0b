"""What the spans and the metrics of an agent share: who asks for them, what sends them, and which resource they come from.

Nothing here needs OpenTelemetry to be installed. Its standard variables turn both on, and always win over what the agent knows.
Names are those of the semantic conventions, as opentelemetry-semantic-conventions 0.66b2 has them.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from elastic_ext.events.event_table import Source

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

NAME = "elastic_ext"
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # names of the entry points
_NO_PUSH = ("", "none", "prometheus")  # the agent serves metrics to Prometheus anyway


@dataclass(frozen=True)
class Signal:
    """One of the signals of OpenTelemetry. name: in its variables. of: what is sent, for people."""

    name: str
    of: str

    @property
    def asked_by(self) -> tuple[str, ...]:
        """Return the variables of which one says that this signal is wanted."""
        return self.exporter, f"OTEL_EXPORTER_OTLP_{self.name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"

    @property
    def exporter(self) -> str:
        return f"OTEL_{self.name}_EXPORTER"

    @property
    def group(self) -> str:
        """Return the group of entry points of its exporters."""
        return f"opentelemetry_{self.name.lower()}_exporter"


TRACES, METRICS = Signal("TRACES", "spans"), Signal("METRICS", "metrics")


def asking(environ: Mapping[str, str], signal: Signal) -> str:
    """Return the variable that asks for this signal; "" if none does."""
    return next((name for name in signal.asked_by if environ.get(name)), "")


def exporters(environ: Mapping[str, str], signal: Signal) -> tuple[str, ...]:
    """Return the entry points to try, first one first; empty: the signal is not wanted. Of several exporters the first counts."""
    if not asking(environ, signal) or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    names = [each.strip() for each in (environ.get(signal.exporter) or "otlp").split(",")]
    name = next((each for each in names if each not in _NO_PUSH), "")
    if name != "otlp":
        return (name,) if name else ()
    variables = f"OTEL_EXPORTER_OTLP_{signal.name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = next((environ[each] for each in variables if environ.get(each)), "")
    return (_OTLP[protocol],) if protocol in _OTLP else tuple(_OTLP.values())


def exporter(signal: Signal) -> SpanExporter | MetricExporter | None:
    """Return a new exporter of this signal, made by its own variables; None, and a line in the log, if it is not installed."""
    names = exporters(os.environ, signal)
    try:
        found = {each.name: each for each in entry_points(group=signal.group) if each.name in names}
        make: Callable[[], SpanExporter | MetricExporter] = next(found[name] for name in names if name in found).load()
    except (ImportError, StopIteration):
        logger.warning(
            "OpenTelemetry: %s asks for %s, but opentelemetry-sdk or its exporter (%s) is not installed",
            *(asking(os.environ, signal), signal.of, " or ".join(names)),
        )
        return None
    return make()


# In a pod: the variables of entrypoints/kubernetes, which the downward API fills, and the attribute that each one is.
POD = {
    "POD_NAME": "k8s.pod.name",
    "POD_UID": "k8s.pod.uid",
    "POD_NAMESPACE": "k8s.namespace.name",
    "ELASTIC_EXT_NODE_NAME": "k8s.node.name",
}
_IN_POD = "KUBERNETES_SERVICE_HOST"  # the kubelet sets it

_process = uuid.uuid4()  # so that an agent of the same job in another process has another id


def attributes(environ: Mapping[str, str], version: str, source: Source, host: str) -> dict[str, str]:
    """Return what the agent knows of the resource that it is."""
    found = {
        "service.name": NAME,
        "service.version": version,
        "service.instance.id": str(uuid.uuid5(_process, f"{source.run_id}/{source.node}")),
        "host.name": host,
        "elastic_ext.run_id": source.run_id,
        "elastic_ext.node": source.node,
    }
    if environ.get(_IN_POD):
        found |= {name: environ[variable] for variable, name in POD.items() if environ.get(variable)}
    return found


def merged(own: Mapping[str, str], named: Mapping[str, object], found: Mapping[str, object]) -> dict[str, str]:
    """Return which of the agent's own attributes hold beside those that the SDK has found.

    named: by the user's variables. found: all, with what the SDK takes for a name and an id where nothing is known: it has one id
    for a process, which may run several agents. A service that the user has named has a version of its own.
    """
    unknown = str(found.get("service.name", "unknown_service")).startswith("unknown_service")
    defaults = {"service.instance.id", *(("service.name",) if unknown else ())} - named.keys()
    left = {name: value for name, value in own.items() if name in defaults or name not in found}
    return left if unknown else {name: value for name, value in left.items() if name != "service.version"}


def resource(version: str, source: Source) -> Resource:
    """Return the resource of this agent. Raises ImportError: there is no opentelemetry-sdk."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    found = Resource.create()
    own = attributes(os.environ, version, source, socket.gethostname())
    return found.merge(Resource(merged(own, OTELResourceDetector().detect().attributes, found.attributes)))
