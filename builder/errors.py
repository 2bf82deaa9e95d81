"""Errors of the builder, by whose fault they are.

::

    BuildError                explained to the user                    exit 1
    ├── InputFault                the user's input cannot be used          exit 4
    │   ├── ModelError                the model file cannot be read or used
    │   │   ├── UnsupportedOperatorError
    │   │   ├── UnboundedError            a length that is only known at run time cannot be padded
    │   │   └── ShapeError                input names, shapes, dtypes
    │   ├── TargetError               an unknown or impossible target
    │   ├── ParityError               the compiled model disagrees with the reference
    │   ├── AccuracyError             a quantised model is less accurate than allowed
    │   ├── KeyFileError              a key file is missing, malformed or readable by others
    │   ├── RecordsError              tuning records do not fit
    │   ├── PackageError              a bundle cannot be read, written or run
    │   ├── ProjectError              edgebundle.toml cannot be used
    │   └── FleetError                a broker or an agent does not answer, or refuses
    └── LinkError                 the linker failed on the compiler's output
    MeasureFault              a measurement gave no result; handled while tuning
    ├── CandidateError            the candidate or the request is wrong
    └── BoardError                the board went away, hung or sent an invalid answer
    FrontEndError             TVM's front end refused a model; explained as a ModelError
    NativeError               onnx or ONNX Runtime refused a model; explained likewise
    └── NativeCrashError          its process crashed on it, or exceeded its limits
    RefusalError              an operator of TensorFlow Lite cannot be written as ONNX; explained likewise
    UnsuitedError             a design space does not serve a kernel, the fallback orders its loops

A message is one line, "expected X, got Y"; `hint` says what to do about it. Foreign exceptions are wrapped
once, where the foreign library is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnx

# What to do about a file that cannot be written.
OTHER_FOLDER: Final = "free some space there, or write to another folder with -o"
# What to do about a length, an axis or a count that is only known at run time.
FIX_HINT: Final = "if an input determines it, make that input a constant: --input-values NAME=VALUE"
# What to do where the importer cannot tell which input it is.
VALUE_HINT: Final = "if a shape or an axis is an input, fix it with --input-values NAME=VALUE"
# What to do about a failure that no input should cause.
FAULT: Final = "this is a fault of the compiler, not of the model: please report it with the model"

_NAMED: Final = 3  # nodes of an operator, in a message


class BuildError(Exception):
    """A failure that the builder explains in one line; raised itself, a fault of the builder.

    Parameters
    ----------
    message
        What was expected and what was found, without a full stop at the end.
    hint
        What the user can do about it.

    Attributes
    ----------
    details
        More lines that explain the failure, at most a screen; the importer adds them.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = FAULT) -> None:
        super().__init__(message)
        self.hint = hint
        self.details: tuple[str, ...] = ()


class InputFault(BuildError):  # noqa: N818 - it names whose fault it is; its leaves are the errors
    """The user's input cannot be used.

    Parameters
    ----------
    message
        As in `BuildError`.
    hint
        What the user can do about it; required, because a refusal without it is a dead end.
    """

    exit_code = 4

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)


class ModelError(InputFault):
    """The model file cannot be read or used."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An operator that cannot be imported.

    Attributes
    ----------
    operator
        Its type, preceded by its domain if that is not ONNX's.
    nodes
        The names of its nodes.
    reason
        Why they cannot be imported, in one line.
    """

    operator: str
    nodes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.nodes) - _NAMED} more" if len(self.nodes) > _NAMED else ""
        return f"{self.operator} ({', '.join(self.nodes[:_NAMED])}{more}): {self.reason}"


class UnsupportedOperatorError(ModelError):
    """The model has operators that cannot be imported; the message lists all of them.

    Parameters
    ----------
    message, hint
        As in `BuildError`.
    obstacles
        The operators at fault.
    """

    def __init__(self, message: str, *, hint: str, obstacles: Sequence[Obstacle] = ()) -> None:
        super().__init__(message, hint=hint)
        self.obstacles = tuple(obstacles)

    @classmethod
    def listing(cls, obstacles: Sequence[Obstacle], *, hint: str) -> UnsupportedOperatorError:
        """Return the error that lists operators, each with at most three of its nodes and the reason."""
        noun = "operator" if len(obstacles) == 1 else "operators"
        listed = "; ".join(map(str, obstacles))
        return cls(f"{len(obstacles)} {noun} cannot be imported: {listed}", hint=hint, obstacles=obstacles)


class ShapeError(ModelError):
    """An input's name, shape or dtype does not fit the model."""


class UnboundedError(ModelError):
    """A node cannot take, or make, a length that is only known at run time.

    Parameters
    ----------
    node
        The node.
    reason
        Why, in one line.
    """

    def __init__(self, node: onnx.NodeProto, reason: str) -> None:
        super().__init__(f"{node.op_type} ({node.name}): {reason}", hint=FIX_HINT)
        self.node = node
        self.reason = reason


class TargetError(InputFault):
    """A target is unknown, malformed or impossible."""


class ParityError(InputFault):
    """The compiled model disagrees with the reference beyond the tolerance."""


class AccuracyError(InputFault):
    """A quantised model is less accurate than allowed."""


class KeyFileError(InputFault):
    """A key file is missing, malformed or readable by others."""


class RecordsError(InputFault):
    """Tuning records do not fit this version, target or model."""


class PackageError(InputFault):
    """A bundle cannot be read, written or run."""


class ProjectError(InputFault):
    """`edgebundle.toml` cannot be used."""


class FleetError(InputFault):
    """A broker or an agent does not answer, or refuses."""


class LinkError(BuildError):
    """The linker failed on the compiler's output: a fault of the builder."""


class MeasureFault(Exception):  # noqa: N818 - its leaves are the errors
    """A measurement gave no result."""


class CandidateError(MeasureFault):
    """The board refused: the candidate or the request is wrong."""


class BoardError(MeasureFault):
    """The board went away, hung or sent an invalid answer."""


class FrontEndError(Exception):
    """TVM's front end refused a model.

    Parameters
    ----------
    reason
        The front end's reason, in one line.
    depends_on_values
        Whether the reason is that a shape, an axis or another setting is only known at run time.
    """

    def __init__(self, reason: str, *, depends_on_values: bool = False) -> None:
        super().__init__(reason)
        self.depends_on_values = depends_on_values


class NativeError(Exception):
    """Native code of onnx or ONNX Runtime refused a model."""


class NativeCrashError(NativeError):
    """Native code of onnx or ONNX Runtime crashed on a model, or exceeded its limits.

    Parameters
    ----------
    reason
        What died, and how, in one line.
    is_repeatable
        Whether it takes no longer to see it again: a crash, but no limit.
    """

    def __init__(self, reason: str, *, is_repeatable: bool = False) -> None:
        super().__init__(reason)
        self.is_repeatable = is_repeatable


class UnsuitedError(ValueError):
    """A design space does not serve this kernel, by intention."""


class RefusalError(Exception):
    """An operator of TensorFlow Lite cannot be written as ONNX; the message says only why.

    Parameters
    ----------
    message
        Why.
    hint
        As in `BuildError`.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def lines_of(error: BaseException) -> list[str]:
    """Return the lines of a foreign exception's text; its class, if it has no text."""
    return str(error).strip().splitlines() or [type(error).__name__]
