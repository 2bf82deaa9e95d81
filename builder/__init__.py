"""The workstation side of edgebundle: import, compile, tune and sign models.

The calls of `tvmc` (`load`, `tune`, `compile`, `run`) in Python::

    from builder import Options, compile, load, read_private, run, tune

    model = load("resnet50-v2-7.onnx")
    records = tune(model, target="host", records_path="records")  # optional
    options = Options(preprocess="imagenet", postprocess="softmax,top5")
    package = compile(model, "host", options, tuning_records=records)
    package.sign(read_private("keys/signing.key")).save("resnet50.bundle")
    result = run(package, "cat.jpg", benchmark=True)
    print(result.times, result.get_output("output_0"))

Each name is imported at its first use: a program that only verifies a bundle never loads a compiler.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from builder.boards.measuring_process import RunnerOptions
    from builder.bundles.key_files import read_private
    from builder.bundles.package import Package
    from builder.bundles.signers import open_signer
    from builder.compiler import compile
    from builder.compiling.identity import Identity
    from builder.compiling.options import Options
    from builder.compiling.repack import repack
    from builder.importer import ImportedModel, load
    from builder.quantising.quantise import Limits, QuantisedModel, quantize
    from builder.quantising.weights_only import WeightsOnlyModel, quantize_weights
    from builder.records.best_records import pick_best
    from builder.records.folder import Records
    from builder.records.task import Task
    from builder.running.local_run import RunResult, profile, run
    from builder.target.device_target import DeviceTarget, resolve
    from builder.tuning.options import TrackerBoards, TuneOptions
    from builder.tuning.tasks.extraction import extract_tasks
    from builder.tuning.tuner import tune

# Disable the telemetry of ONNX Runtime (from 1.29 on) before it is loaded. Set the variable to 0 to allow it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_MODULE_OF: Final = {
    "DeviceTarget": "builder.target.device_target",
    "Identity": "builder.compiling.identity",
    "ImportedModel": "builder.importer",
    "Limits": "builder.quantising.quantise",
    "Options": "builder.compiling.options",
    "Package": "builder.bundles.package",
    "QuantisedModel": "builder.quantising.quantise",
    "Records": "builder.records.folder",
    "RunResult": "builder.running.local_run",
    "RunnerOptions": "builder.boards.measuring_process",
    "Task": "builder.records.task",
    "TrackerBoards": "builder.tuning.options",
    "TuneOptions": "builder.tuning.options",
    "WeightsOnlyModel": "builder.quantising.weights_only",
    "compile": "builder.compiler",
    "extract_tasks": "builder.tuning.tasks.extraction",
    "load": "builder.importer",
    "open_signer": "builder.bundles.signers",
    "pick_best": "builder.records.best_records",
    "profile": "builder.running.local_run",
    "quantize": "builder.quantising.quantise",
    "quantize_weights": "builder.quantising.weights_only",
    "read_private": "builder.bundles.key_files",
    "repack": "builder.compiling.repack",
    "resolve": "builder.target.device_target",
    "run": "builder.running.local_run",
    "tune": "builder.tuning.tuner",
}

__all__ = [
    "DeviceTarget",
    "Identity",
    "ImportedModel",
    "Limits",
    "Options",
    "Package",
    "QuantisedModel",
    "Records",
    "RunResult",
    "RunnerOptions",
    "Task",
    "TrackerBoards",
    "TuneOptions",
    "WeightsOnlyModel",
    "compile",
    "extract_tasks",
    "load",
    "open_signer",
    "pick_best",
    "profile",
    "quantize",
    "quantize_weights",
    "read_private",
    "repack",
    "resolve",
    "run",
    "tune",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'builder' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
