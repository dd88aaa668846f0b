"""The goodput of real jobs, beside the trace that their workers write by their own clocks."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_ext.base import goodput
from tests.etcd_server import etcd_server
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Job

SCRIPT = SCRIPTS / "traced_job.py"
VARIABLES = {"TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO", "ELASTIC_EXT_BACKOFF": "0"}


def traced(folder: Path, repeated_to: int) -> dict[str, float]:
    """Seconds by state, the mean over ranks. Steps up to `repeated_to` that a rank does a second time are lost."""
    found: dict[str, float] = defaultdict(float)
    ranks = [each for each in folder.iterdir() if each.name.isdigit()]
    for path in ranks:
        done: set[int] = set()
        for line in path.read_text().splitlines():
            name, step, began, ended = line.split()
            state = {"load": goodput.LOAD, "data": goodput.DATA, "save": goodput.SAVE}.get(name, goodput.PRODUCTIVE)
            if name == "crash" or (name == "step" and int(step) in done):
                state = goodput.LOST
            if name == "step":
                done.add(int(step))
            found[state] += (float(ended) - float(began)) / len(ranks)
    return found


def series(text: str) -> dict[str, float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.labels.get("state", "") or sample.name: sample.value for sample in samples if "agent_state" not in sample.name}
