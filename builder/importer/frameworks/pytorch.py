"""PyTorch: files of `torch.export` (`.pt2`), and modules and programs in memory.

Both are exported and run by `pytorch_process.py`. A module is first exported to a program here, by the
PyTorch that its caller has imported; this program never imports PyTorch itself.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from builder.errors import ModelError
from builder.importer.frameworks.conversion import Framework, Settings, import_with
from builder.importer.frameworks.pt2_archive import EXPORT, check_pt2, rewrite_pt2
from builder.importer.model_file import file_sha256
from builder.importer.onnx_import import ImportedModel
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet

PYTORCH: Final = Framework(
    "PyTorch", Path(__file__).with_name("pytorch_process.py"), (("torch", "onnxscript"),), "torch onnxscript"
)
_EXAMPLES: Final = "load(module, (torch.zeros(1, 3, 224, 224),)), with a tensor for each argument of forward"


def load_program(path: Path, settings: Settings) -> ImportedModel:
    """Import a file that `torch.export.save` has written.

    Raises `ModelError` if it is not such a file, no Python has PyTorch, or PyTorch or the importer refuses
        it.
    """
    digest = file_sha256(path)
    check_pt2(path)  # before a Python is looked for

    def place(folder: Path) -> None:
        rewrite_pt2(path, folder / "model.pt2")
        check_pt2(folder / "model.pt2")  # what is checked is what is loaded

    model = import_with(PYTORCH, str(path), place, settings)
    return replace(model, source_sha256=digest, name=path.stem)


def is_in_memory(model: object) -> bool:
    """Whether an object is a module or an exported program of PyTorch."""
    torch = sys.modules.get("torch")
    kinds = (torch.nn.Module, torch.export.ExportedProgram) if torch is not None else ()
    return isinstance(model, kinds)


def load_in_memory(model: object, example_inputs: object, settings: Settings) -> ImportedModel:
    """Import a module or an exported program of PyTorch.

    `model`: a `torch.nn.Module`, which is exported in evaluation mode and left as it was, or a
        `torch.export.ExportedProgram`.
    `example_inputs`: the arguments of the module's `forward`: a tensor, a tuple of tensors, or a dict from a
        name to a tensor.
    `settings`: what the user says. The Python is this one.
    Raises `ModelError` if PyTorch or the importer refuses it.
    """
    torch: Any = sys.modules["torch"]
    name = type(model).__name__
    program: object = model
    notes: tuple[str, ...] = ()
    if isinstance(model, torch.nn.Module):
        program, notes = _exported(model, name, example_inputs)
    else:
        name = "program"
    if settings.progress is not None:
        for note in notes:
            settings.progress(note)
    with tempfile.TemporaryDirectory(prefix="edgebundle-") as folder:
        path = Path(folder) / f"{name}.pt2"
        try:
            with quiet():
                torch.export.save(program, path)
        except FOREIGN_FAILURES as error:
            raise ModelError(f"PyTorch cannot save {name}: {first_line(error)}", hint=EXPORT) from error

        def place(to: Path) -> None:
            check_pt2(path)
            shutil.move(path, to / "model.pt2")

        imported = import_with(
            PYTORCH, name, place, replace(settings, python=settings.python or sys.executable)
        )
    return replace(imported, name=name, notes=(*notes, *imported.notes))


def _exported(module: Any, name: str, examples: object) -> tuple[object, tuple[str, ...]]:  # noqa: ANN401
    """Export a module in evaluation mode; its own mode and gradients stay as they were."""
    torch: Any = sys.modules["torch"]
    args, kwargs = _arguments(torch.Tensor, name, examples)
    modes = {each: each.training for each in module.modules()}
    notes = (f"{name} was in training mode: exported in evaluation mode",) if module.training else ()
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ModelError(
            f"expected {name} on the CPU, got {tensors[0].device}", hint="load(module.cpu(), ...)"
        )
    try:
        module.eval()
        with quiet(), torch.no_grad():
            return torch.export.export(module, args, kwargs), notes
    except Exception as error:  # the module is the user's: it raises anything
        raise ModelError(
            f"PyTorch cannot export {name}: {type(error).__name__}: {first_line(error)}",
            hint="torch.export.export(module.eval(), example_inputs) says more: see "
            "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/export.html",
        ) from error
    finally:
        for each, is_training in modes.items():
            each.training = is_training


def _arguments(tensor: type, name: str, examples: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if examples is None:
        raise ModelError(f"expected example inputs with {name}, got none", hint=_EXAMPLES)
    if isinstance(examples, tensor):
        return (examples,), {}
    if isinstance(examples, Mapping):
        return (), dict(examples)
    if isinstance(examples, (tuple, list)):
        return tuple(examples), {}
    raise ModelError(
        f"expected a tensor, a tuple or a dict as example inputs of {name}, got {type(examples).__name__}",
        hint=_EXAMPLES,
    )
