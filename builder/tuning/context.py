"""The objects that the steps of a tuning run share."""

from __future__ import annotations

from dataclasses import dataclass

from builder.boards.interface import Boards
from builder.boards.measuring_process import RunnerOptions
from builder.importer import ImportedModel
from builder.records.folder import Records
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.options import TuneOptions
from builder.tuning.views.progress import View


@dataclass(frozen=True, slots=True)
class TuningContext:
    """The collaborators and options of one call of `tune`."""

    model: ImportedModel
    target: DeviceTarget
    records: Records
    builder: CandidateBuilder
    boards: Boards
    options: TuneOptions
    runner: RunnerOptions
    view: View
