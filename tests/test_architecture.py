"""Who may import whom, and that nothing imports in a circle. Imports for typing and inside functions count."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import elastic_ext
from elastic_ext.base.settings import Settings
from elastic_ext.features.row import AgentFacts, FeatureRow
from elastic_ext.features.table import FEATURES, FOLDERS

PACKAGE = Path(elastic_ext.__file__).parent

# A subpackage may import those in its row, and itself. "." is what lies at the top: the version and the names for scripts. "rows"
# is what is known of each feature that is off, too, and "features" the rest of their folders: the agent has only the rows.
MAY_IMPORT = {
    "base": "",
    ".": "base",
    "etcd": "base",
    "events": "base",
    "telemetry": "base events workers",
    "http": "base",
    "status": "base failures rendezvous telemetry",
    "timeline": "base events telemetry",
    "failures": "base",
    "workers": "base",
    "hangs": "base workers",
    "training": "base workers",
    "checkpoints": "base training",
    "planning": "base checkpoints failures hangs",
    "rendezvous": "base etcd failures",
    "own_etcd": "base etcd failures rendezvous",
    "embedded": "base etcd failures own_etcd rendezvous",
    "rows": "base rendezvous telemetry",
    "agent": ". base checkpoints events failures embedded hangs http own_etcd rendezvous rows status telemetry workers",
    "features": ". agent base checkpoints events failures hangs rendezvous rows status telemetry workers",
    "cli": ". base checkpoints embedded etcd failures own_etcd planning rendezvous status telemetry timeline workers",
}

# These need nothing but Python: they decide, and are tested in microseconds.
PURE = (
    *(f"failures/{name}.py" for name in ("classify", "history", "ledger", "policy", "rules")),
    *(f"failures/{name}.py" for name in ("abort_lines", "fingerprints", "servers", "traceback_forms", "tracebacks")),
    *("failures/joint_evidence.py", "rendezvous/configuration.py", "rendezvous/drains.py", "rendezvous/rounds.py"),
    *("rendezvous/board.py", "rendezvous/topics.py", "base/save_cost.py"),
    *("own_etcd/endpoint.py", "own_etcd/decisions.py"),
    *(f"timeline/{name}.py" for name in ("events", "spans", "svg", "trace")),
    *("telemetry/goodput.py", "status/headline.py", "status/job_status.py", "events/event_table.py"),
    *(
        "checkpoints/choice/decisions.py",
        "checkpoints/agreement/messages.py",
        "checkpoints/memory/pace.py",
        "checkpoints/record/proof.py",
        "checkpoints/sharing/merging.py",
        "checkpoints/sharing/mirror_plan.py",
    ),
    *("hangs/detector.py", "hangs/unanswered.py"),
    *(f"features/{path.parent.name}/decide.py" for path in sorted(PACKAGE.glob("features/*/decide.py"))),
    "planning/advice.py",
)


@cache
def modules() -> dict[str, Path]:
    """By dotted name; a package is named by its folder."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports, of this package as modules."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in full)


def loaded_with(*names: str) -> set[str]:
    """What Python loads of this package with these modules, but for what functions import when they are called."""
    found, left = set[str](), {f"elastic_ext.{name}" for name in names}
    while left:
        found |= left
        parents = {name.rpartition(".")[0] for name in left}
        inside = {other for name in left for other in imported_at_once(modules()[name])}
        left = ((parents | inside) & modules().keys()) - found
    return found


def imported_at_once(path: Path) -> Iterator[str]:
    """As `imported`, without what only type checkers and functions import."""
    if path == PACKAGE / "features/table.py":  # it names them
        yield from (f"elastic_ext.features.{folder}.rows" for folder in FOLDERS)
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in full)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# What an agent on one machine has no use for.
OF_SEVERAL_MACHINES = {
    *("etcd.client", "etcd.watch", "etcd.lease", "etcd.calls", "embedded.hosting", "embedded.process", "own_etcd"),
    *(f"rendezvous.{name}" for name in ("handler", "place", "leader", "links", "presence", "fence", "round_part", "running_job")),
}


def test_one_machine_loads_nothing_for_several():
    found = {name.removeprefix("elastic_ext.") for name in loaded_with("agent.supervisor", "embedded.one_machine")}
    assert {"agent.round", "rendezvous.contract", "embedded.keyspace"} <= found
    assert not found & OF_SEVERAL_MACHINES
    several = {name.removeprefix("elastic_ext.") for name in loaded_with("rendezvous.handler", "embedded.hosting")}
    assert several >= OF_SEVERAL_MACHINES - {"etcd.client", "etcd.watch", "etcd.lease", "etcd.calls", "embedded.process"}


# What an agent loads only if it is asked for, besides the features of `features/table.py`: not even a failure needs it otherwise.
ASKED_FOR = {
    "events.output": "events_file, or a variable of OpenTelemetry",
    "events.spans": "a variable of OpenTelemetry",
    "failures.slurm": "a job of Slurm",
    "failures.kubernetes": "a pod",
    "failures.user_rules": "rules, or a package with rules",
    "workers.standby.pool": "standby",
    "workers.standby.client": "standby",
    "workers.standby.server": "standby",
    "workers.standby.modules": "standby",
    "features.drains.published": "checkpoint_dir on several machines",
    "features.record.mirror": "mirror",
    "checkpoints.sharing.mirror_plan": "mirror",
    "checkpoints.sharing.mirrored": "mirror",
}


def of_feature(row: FeatureRow) -> str:
    return f"features.{row.where.partition(':')[0]}"


def short(names: Iterable[str]) -> set[str]:
    return {name.removeprefix("elastic_ext.") for name in names}


def loaded_with_features(facts: AgentFacts) -> set[str]:
    """What an agent loads that has these features."""
    on = [of_feature(row) for row in FEATURES if row.on(facts)]
    handler = "embedded.one_machine" if facts.one_machine else "rendezvous.handler"
    return short(loaded_with("agent.plugin", "agent.supervisor", handler, *on))


BARE = AgentFacts(Settings(stragglers="off", hang_timeout=0.0), one_machine=True)


def test_an_agent_loads_only_what_is_on():
    """It is the same without any feature: so no other part of the agent imports one at once."""
    found = loaded_with_features(BARE)
    assert {"agent.round", "agent.companions", "failures.rules", "workers.standby.rules"} <= found
    assert not found & {of_feature(row) for row in FEATURES}
    assert not found & ASKED_FOR.keys()
    assert not {name for name in found if subpackage(f"elastic_ext.{name}") == "checkpoints"}
    assert not found & {"hangs.watch", "features.stragglers.decide"}


def test_mirrored_parts_are_loaded_if_asked_for():
    settings = Settings(checkpoint_dir="/checkpoints", local_dir="/local", local_saves="all")
    found, asked = loaded_with_features(AgentFacts(settings)), {name for name, by in ASKED_FOR.items() if by == "mirror"}
    assert "features.record.watch" in found
    assert not found & asked
    assert asked <= short(loaded_with("features.record.mirror"))


CHECKPOINTS = {"checkpoints.agreement.nodes", "checkpoints.choice.listing", "checkpoints.storage"}
ONLY_WITH = {
    "resume": CHECKPOINTS | {"checkpoints.agreement.quarantine", "checkpoints.verifying"},
    "copies to checkpoint_dir": {"checkpoints.copying.copier"},
    "drains": {"features.drains.watch"},
    "drains with checkpoint_dir": {
        "features.drains.published",
        "features.drains.watch",
        *CHECKPOINTS - {"checkpoints.agreement.nodes"},
    },
    "integrity": {"features.integrity.watch"},
    "stragglers": {"features.stragglers.decide"},
    "record of saves": {"checkpoints.record.stored", "checkpoints.record.proof"},
    "hangs": {"hangs.watch"},
    "hangs with NCCL": {"hangs.watch", "features.hangs.flight_recorder"},
    "metrics by OpenTelemetry": {"telemetry.otlp"},
}


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_a_feature_brings_what_it_needs(row):
    """At once, with its own module: what it needs after a failure must be there by then."""
    bare = short(loaded_with("agent.plugin", "agent.supervisor", "embedded.one_machine"))
    brings = short(loaded_with(of_feature(row))) - bare
    assert ONLY_WITH.get(row.name, set()) <= brings
    assert not brings & {of_feature(other) for other in FEATURES if other.name not in (row.name, *NEEDS.get(row.name, ()))}


# A feature may use the code of another one.
NEEDS = {
    "drains with checkpoint_dir": ["drains"],
    "record of saves": ["resume"],
    "hangs with NCCL": ["hangs"],
}


def subpackage(name: str) -> str:
    parts = name.split(".")
    if parts[1:2] == ["features"] and (len(parts) < 4 or parts[3] in ("rows", "decide")):
        return "rows"
    return parts[1] if len(parts) > 2 or ((PACKAGE / parts[-1]).is_dir() and len(parts) == 2) else "."


def test_subpackages_import_one_way():
    wrong = {
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imported(path)
        if other in modules() and subpackage(other) not in {subpackage(name), *MAY_IMPORT[subpackage(name)].split()}
    }
    assert not wrong


def test_the_table_has_no_circle():
    left = {name: set(row.split()) for name, row in MAY_IMPORT.items()}
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left


def test_files_do_not_import_in_a_circle():
    left = {name: {other for other in imported(path) if other in modules() and other != name} for name, path in modules().items()}
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left, "these import each other, or what does"


def test_what_decides_is_pure():
    for name in PURE:
        outside = {other.partition(".")[0] for other in imported(PACKAGE / name)} - {"elastic_ext", "__future__"}
        assert not outside & {"torch", "socket", "subprocess", "threading", "os", "time", "fsspec"}, name


def test_torchs_private_names_are_used_in_one_file():
    def private(path: Path) -> bool:
        return any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("torch")
            and any(alias.name.startswith("_") for alias in node.names)
            for node in ast.walk(ast.parse(path.read_text()))
        )

    assert {name for name, path in modules().items() if private(path)} <= {"elastic_ext.base.torch_private"}


OF_TRAINERS = "of Hugging Face's Trainer, of Lightning, of accelerate: a script imports one of them"
SAME_NAME = {"SaveOnDemand": OF_TRAINERS, "Resilience": OF_TRAINERS}


def test_a_class_name_means_one_thing():
    trees = [ast.parse(path.read_text()) for path in modules().values()]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name, count in Counter(names).items() if count > 1 and not name.startswith("_")} == set(SAME_NAME)


LARGER = {
    "Checkpointer.__init__": "what a user may choose; each argument has its own line in the docstring",
}


def test_nothing_is_too_large():
    """At most 700 lines for a module; 250, and 12 attributes, for a class that is no frozen record; 50, and 7 parameters."""
    found = set()
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        for node in classes:
            functions |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)}
        found |= {name for _ in path.read_text().splitlines()[700:]}
        found |= {node.name for node in classes if lines(node) > 250 or (len(attributes(node)) > 12 and not is_frozen(node))}
        found |= {each for each, node in functions.items() if lines(node) > 50 or parameters(node) > 7}
    assert found == set(LARGER)


def test_any_is_rare():
    """At most 120: what torch, etcd3, a file or a script gives, of which nothing is known before it is looked at."""
    code = [line for path in modules().values() for line in path.read_text().splitlines() if "import" not in line]
    assert sum(len(re.findall(r"\bAny\b(?! [a-z])", line)) for line in code) <= 120


def lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def attributes(node: ast.ClassDef) -> set[str]:
    fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    return fields | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def is_frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
