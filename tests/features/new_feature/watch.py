"""Looks for a file, and ends the round once it is there."""

from __future__ import annotations

import os

from elastic_ext.features.new_feature.decide import APPEARED, Appeared

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.feature import Feature, RoundParts

PATH = "END_ROUND"
LOOK_S = 0.1


class FileWatch(Companion):
    def __init__(self, feature: EndByFile) -> None:
        self._feature = feature

    def next_check_s(self) -> float:
        return LOOK_S

    def check(self, workers: LocalWorkers) -> None:
        if os.path.exists(PATH):
            os.unlink(PATH)
            self._feature.appeared()


class EndByFile(Feature):
    count = 0

    def beside_round(self, round_: RoundParts) -> Companion:
        return FileWatch(self)

    def appeared(self) -> None:
        self.count += 1
        self.parts.observation.of_features.show(files_appeared={(): self.count})
        self.parts.job.part.post(APPEARED, Appeared(PATH))
