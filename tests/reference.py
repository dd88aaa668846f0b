"""The generated tables of elastic_ext/docs, and the schemas of JSON that others read. `make reference` writes them;
test_reference.py compares them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from elastic_ext.base import goodput, torch_names
from elastic_ext.base.diagnosis import Weight
from elastic_ext.base.errors import EX_CODE, EX_CONFIG, EX_FAILED, EX_NODE, EX_TRY_AGAIN, EX_USER
from elastic_ext.base.settings import Settings
from elastic_ext.base.torch_names import PrivateNames
from elastic_ext.failures import policy
from elastic_ext.failures.rules import RULES, Rule
from elastic_ext.features.table import FEATURES
from elastic_ext.status import job_status
from elastic_ext.telemetry import families
from tests import versions
from tests.jobs import ROOT

DOCS = ROOT / "elastic_ext" / "docs"
EVENT_FILE = ROOT / "elastic_ext" / "events" / "events.schema.json"
JOB_SCHEMA = ROOT / "elastic_ext" / "status" / "job.schema.json"

TIERS = ("your own", "stop requested", "hardware", "program output", "exit code or signal alone")

EXIT_CODES = {
    0: "the job is done",
    EX_FAILED: "the budget is spent, or nothing is known about the failure",
    EX_CODE: "a bug in the code or the data: do not retry",
    EX_NODE: "this node is bad, or was asked to leave (`elastic-ext drain`): replace it",
    EX_TRY_AGAIN: "preempted, or the infrastructure failed: try again; or training is done, but the last checkpoint is "
    "only in this node's `local_dir`",
    EX_CONFIG: "wrong usage or configuration: nothing was started, or this node cannot take part (`stock`: then 1)",
    EX_USER: "stopped by the user",
}


def with_events_of_features(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of events, in which those with a $comment are by `events.json` of the features' folders."""
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "elastic_ext" / "features").glob("*/events.json")):
        for name, event in json.loads(path.read_text()).items():
            then = event | {"required": list(event["properties"])}
            comment = f"of features/{path.parent.name}/{path.name}"
            found[name] = {"$comment": comment, "if": {"properties": {"event": {"const": name}}}, "then": then}
    known = {each["if"]["properties"]["event"]["const"]: each for each in schema["allOf"]}
    kept = [found.pop(name, each) for name, each in known.items() if name in found or "$comment" not in each]
    return schema | {"allOf": [*kept, *found.values()]}


EVENT_SCHEMA = with_events_of_features(json.loads(EVENT_FILE.read_text()))
EVENTS = {each["if"]["properties"]["event"]["const"]: each["then"] for each in EVENT_SCHEMA["allOf"]}  # by name


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def settings() -> str:
    def default(value: object) -> str:
        return {"True": "on", "False": "off", "None": ""}.get(str(value), str(value))

    rows = [(f"`{each.name}`", default(each.default), each.metadata["help"]) for each in dataclasses.fields(Settings)]
    return table(("key", "default", "what"), rows)


def rules() -> str:
    def evidence(rule: Rule) -> str:
        return " ".join(letter for letter, weight in zip("abcde", Weight, strict=True) if weight in rule.places)

    rows = [(TIERS[each.tier], f"`{each.name}`", evidence(each), each.kind, each.response.value, each.because) for each in RULES]
    return table(("tier", "rule", "evidence", "kind", "answer", "because"), rows)


def exit_codes() -> str:
    presets = list(policy.EXIT_CODES)
    rows = []
    for code, what in EXIT_CODES.items():
        # Wrong usage is found before a preset is known.
        shown = [str(code if code in (0, EX_CONFIG) else policy.exit_code_for(code, preset)) for preset in presets]
        rows.append((*shown, what))
    return table((*(f"`{preset}`" for preset in presets), "meaning"), rows)


def metrics() -> str:
    suffixes = {"counter": "_total", "info": "_info"}
    rows = []
    tables = (
        families.JOB,
        families.WORKERS,
        families.OTHERS,
        families.VERDICTS,
        families.ETCD,
        families.GOODPUT,
        *(row.metrics for row in FEATURES),
    )
    for name, family in (item for table in tables for item in table.items()):
        kind = family.new(name).type
        rows.append((f"`{name}{suffixes.get(kind, '')}`", kind, ", ".join(family.labels), family.most, family.help))
    return table(("name", "type", "labels", "series per agent", "what"), sorted(rows))


def goodput_states() -> str:
    return table(("state", "what"), [(f"`{state}`", what) for state, what in goodput.STATES.items()])


def torch_and_python() -> str:
    return table(("torch", "Python", "suite", "seam tests", "on a GPU"), versions.rows(versions.read()))


def private_names() -> str:
    def without(each: PrivateNames) -> str:
        since = f" (since torch {'.'.join(map(str, each.since))})" if each.since != torch_names.OLDEST else ""
        return f"no job begins: {each.lost}{since}" if each.needed else f"{each.lost}{since}"

    rows = [(f"`{each.module}`", ", ".join(f"`{name}`" for name in each.names), without(each)) for each in torch_names.NAMES]
    return table(("module", "names", "without them"), rows)


def field_type(field: dict[str, Any]) -> str:
    types = [field["type"]] if isinstance(field["type"], str) else field["type"]
    item = field.get("items") or field.get("additionalProperties")
    return f"{types[0]} of {item['type']}" if item else " or ".join(types)


def events() -> str:
    version = {"schema": {"type": "integer", "description": "version of this table: 1"}}
    every = {"description": "Every event.", "properties": EVENT_SCHEMA["properties"] | version}
    rows = []
    for name, event in {"": every, **EVENTS}.items():
        rows.append((f"`{name}`" if name else "", "", "", "", event["description"]))
        for field, of in event["properties"].items():
            meaning, unit = re.fullmatch(r"(.*?)(?: \((s|steps)\))?", of["description"]).groups("")  # type: ignore[union-attr]
            rows.append(("", f"`{field}`", field_type(of), unit, meaning))
    return table(("event", "field", "type", "unit", "what"), rows)


def event_schema() -> str:
    return json.dumps(EVENT_SCHEMA, indent=1) + "\n"


def job_schema() -> str:
    """The JSON Schema of /job.json and `elastic-ext status --json`, by the dataclasses."""
    found: dict[str, Any] = {}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "The status of a job, schema 1"}
    whole |= schema_of(job_status.Document, found)
    whole["properties"]["schema"] = {"const": job_status.SCHEMA}
    return json.dumps({**whole, "$defs": found}, indent=1) + "\n"


def schema_of(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The schema of values of this type. found: gets those of the dataclasses in it, by name."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return schema_of(arguments[0], found)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each, found) for each in arguments]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], found)}
    if not dataclasses.is_dataclass(hint):
        return {"type": {str: "string", int: "integer", float: "number", type(None): "null"}[hint]}
    hints = get_type_hints(hint, include_extras=True)
    properties = {name: schema_of(of, found) for name, of in hints.items()}
    made = {"type": "object", "required": list(hints), "properties": properties}
    if hint is job_status.Document:
        return made
    found[hint.__name__] = {"description": inspect.cleandoc(hint.__doc__ or "").split("\n\n")[0], **made}
    return {"$ref": f"#/$defs/{hint.__name__}"}


# Each table by the name in the comment above it: its page, and what makes it.
TABLES = {
    "settings": ("settings.md", settings),
    "rules": ("rules.md", rules),
    "exit codes": ("failures.md", exit_codes),
    "goodput states": ("operations.md", goodput_states),
    "metrics": ("metric_list.md", metrics),
    "events": ("event_list.md", events),
    "torch and Python": ("limits.md", torch_and_python),
    "private names": ("limits.md", private_names),
}


def parted(name: str) -> tuple[str, str, str]:
    """The page of a table: what stands before the table, the table, and the rest."""
    page, _ = TABLES[name]
    before, mark, rest = (DOCS / page).read_text().partition(f"<!-- {name} -->\n")
    assert mark, f"{page} has no place for the table of {name}"
    shown, end, after = rest.partition("<!-- end -->")
    return before + mark, shown, end + after


def write() -> None:
    """Write all tables and schemas."""
    EVENT_FILE.write_text(event_schema())
    for name, (page, make) in TABLES.items():
        before, _, after = parted(name)
        (DOCS / page).write_text(before + make() + after)
    JOB_SCHEMA.write_text(job_schema())


if __name__ == "__main__":
    write()
