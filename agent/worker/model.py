"""The model that a worker serves: from a bundle's memory files to answers.

Promises: every request gets an answer, unless it kills the process, which the supervisor handles. The files
are trusted: they come from a verified bundle. This module must be imported after numpy's environment
variables are set and before the sandbox is closed.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest
from agent.errors import DeadlineError, ExecutionError, FormatError, InputError, RequestError
from agent.runtime import pictures
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.graph_executor import GraphModule, create
from agent.runtime.lengths import cut, cut_objects
from agent.runtime.module import KernelModule
from agent.runtime.postprocess import Postprocessor, Value
from agent.runtime.preprocess import Preprocessor
from agent.runtime.rows import RowReader
from agent.runtime.self_test import check_samples
from agent.runtime.storage import Array
from agent.runtime.streaming import is_streaming
from agent.wire.answer_head import OK, AnswerHead, one_line
from agent.wire.content_types import JSON
from agent.worker.channel import MAX_PAYLOAD_BYTES
from agent.worker.codec import Codec, Decoded, Payload, import_cbor
from agent.worker.fitting import fitting
from agent.worker.frames import NOT_COMPARABLE, Answer, Load, Request
from agent.worker.streams import Step, Streams

_log = logging.getLogger(__name__)

# The agent ends a worker that sends more.
MAX_ANSWER_BYTES: Final = MAX_PAYLOAD_BYTES


class Members:
    """The bundle's memory files by name; closing one frees its memory if no other process has it open."""

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._descriptors = dict(descriptors)

    def __contains__(self, name: str) -> bool:
        return name in self._descriptors

    def descriptor(self, name: str) -> int:
        """Return a member's descriptor.

        Raises
        ------
        FormatError
            If it is absent.
        """
        try:
            return self._descriptors[name]
        except KeyError:
            raise FormatError(f"expected {name} in the bundle, got none") from None

    def read(self, name: str) -> bytes:
        """Return a small member's bytes."""
        with self.mapped(name) as view:
            return bytes(view)

    @contextmanager
    def mapped(self, name: str) -> Iterator[memoryview]:
        """Map a member for reading while the context lasts."""
        descriptor = self.descriptor(name)
        if not os.fstat(descriptor).st_size:
            yield memoryview(b"")
            return
        try:
            file = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            # Only the limit of the address space can make this fail for a memory file.
            raise MemoryError(f"cannot map {name}: {error.strerror}") from error
        with file, memoryview(file) as view:
            yield view

    def close(self, name: str | None = None) -> None:
        """Close one member, or all that are still open."""
        for each in [name] if name is not None else list(self._descriptors):
            os.close(self._descriptors.pop(each))


class Model:
    """A loaded model; `load_model` makes one.

    Parameters
    ----------
    prepared
        Its preprocessing, postprocessing and manifest, set up before the sandbox was closed.
    module
        The graph with its weights, or the graphs of its buckets.
    self_test_error
        Largest relative error of the recorded samples.
    """

    def __init__(
        self, prepared: Prepared, module: GraphModule | BucketedModule, self_test_error: float
    ) -> None:
        self.self_test_error = self_test_error
        self._name = prepared.manifest.name
        self._module = module
        self._postprocess = prepared.postprocessor
        manifest = prepared.manifest
        self._lengths = manifest.lengths
        self._steps = () if manifest.postprocess is None else manifest.postprocess.steps
        self._streams: Streams | None = None
        self._outputs: Callable[[], Mapping[str, Array]]
        target: Callable[[str], Array]
        if isinstance(module, BucketedModule):
            self._outputs, target, fit = module.outputs, module.input_view, fitting(manifest, module)
        else:
            if is_streaming(manifest):
                self._streams = Streams(manifest, module, prepared.labels, prepared.load)
            # Looked up once, so that a request writes straight into the inputs' memory.
            kept = {state.output for state in manifest.states or ()}
            outputs = {
                spec.name: module.output_view(i)
                for i, spec in enumerate(manifest.outputs)
                if spec.name not in kept
            }
            views = {spec.name: module.input_view(spec.name) for spec in manifest.inputs}
            self._outputs, target, fit = lambda: outputs, views.__getitem__, None
        self._codec = Codec(manifest, prepared.preprocessor, target, prepared.cbor, fit, prepared.rows)

    @property
    def module(self) -> GraphModule | BucketedModule:
        """Its graph, or the graphs of its buckets."""
        return self._module

    @property
    def threads(self) -> int:
        """Threads of a kernel; 0 if the library does not say."""
        kernels = self._module.kernels
        return (kernels.threads() or 0) if isinstance(kernels, KernelModule) else 0

    def use_threads(self, count: int) -> None:
        """Let kernels use `count` threads from now on; a changed number restarts the threads."""
        kernels = self._module.kernels
        if isinstance(kernels, KernelModule):
            kernels.set_threads(count)

    def answer(
        self, request: Request, payload: memoryview, clock: Callable[[], float] = time.monotonic
    ) -> tuple[Answer, Payload]:
        """Answer one request.

        Parameters
        ----------
        clock
            `time.monotonic`, or a test's.

        Returns
        -------
        Answer, payload
            The payload may be the model's own memory, which the next request overwrites.
        """
        times = [clock()]
        try:
            if self._streams is not None and request.session_end and self._codec.is_empty(request, payload):
                return self._ended(request, self._streams)
            media_type, decoded = self.decode(request, payload, times[0])
            times.append(clock())
            step = self._enter(request, decoded, clock)
            if step is None:
                self._module.run()
            else:
                step.run()
            times.append(clock())
            return self.encode(request, decoded, media_type, self._outputs(), times, clock, step)
        except Exception as error:  # noqa: BLE001 - the outermost loop of a request: one must not end the worker
            return self.failed(request, error, times, clock)

    def decode(self, request: Request, payload: memoryview, now_s: float) -> tuple[str, Decoded]:
        """Write a request's tensors into the inputs, and return the content type of its answer.

        Raises
        ------
        RequestError
            If its deadline has passed, or it does not fit the model.
        """
        media_type = self._codec.answer_type(request)
        _check_deadline(request, now_s)
        if request.session is not None and self._streams is None:
            raise InputError(f"model {self._name} keeps nothing between requests: expected no session")
        return media_type, self._codec.decode(request, payload)

    def encode(
        self,
        request: Request,
        decoded: Decoded,
        media_type: str,
        outputs: Mapping[str, Array],
        times: list[float],
        clock: Callable[[], float],
        step: Step | None = None,
    ) -> tuple[Answer, Payload]:
        """Turn outputs into a request's answer.

        Raises
        ------
        RequestError
            If the answer cannot be made or encoded.
        """
        values: Mapping[str, Value]
        if decoded.is_raw:
            values = dict(outputs)
        elif step is None or step.heard is None:
            made = outputs
            if self._lengths is not None:
                made = cut_objects(outputs, self._lengths, self._steps)
            values = self._postprocess(made, decoded.placement)
        else:
            values = step.heard
        if self._lengths is not None:
            values = cut(values, outputs, self._lengths)
        number = None if step is None else step.number
        tensors, body = self._codec.encode(request, decoded, media_type, values, MAX_ANSWER_BYTES, number)
        if step is not None:
            # Only now: what is refused can be sent again.
            step.commit()
        times.append(clock())
        bucket = self._bucket() if step is None else NOT_COMPARABLE
        answer = Answer(request.seq, OK, "", media_type, tensors, **_durations(request, times), bucket=bucket)
        return answer if self._streams is None else self._streams.counted(answer, step), body

    def _bucket(self) -> tuple[int, ...]:
        module = self._module
        return module.bucket if isinstance(module, BucketedModule) else ()

    def _ended(self, request: Request, streams: Streams) -> tuple[Answer, Payload]:
        """Answer a request that only ends its session."""
        media_type = self._codec.answer_type(request)
        streams.close(request)
        tensors, body = self._codec.encode(request, Decoded(request.id), media_type, {})
        return streams.counted(Answer(request.seq, OK, "", media_type, tensors), None), body

    def _enter(self, request: Request, decoded: Decoded, clock: Callable[[], float]) -> Step | None:
        if self._streams is None:
            return None
        return self._streams.enter(request, decoded.recording, clock)

    def failed(
        self, request: Request, error: Exception, times: list[float], clock: Callable[[], float]
    ) -> tuple[Answer, Payload]:
        """Return the refusal of a request for which an exception was raised."""
        if isinstance(error, RequestError):
            return self._refuse(request, error, times, clock)
        if isinstance(error, MemoryError):
            refused = ExecutionError("the request needs more memory than the model's limit")
            return self._refuse(request, refused, times, clock)
        _log.error("a request failed", exc_info=error)
        refused = ExecutionError(f"the worker failed: {type(error).__name__}")
        return self._refuse(request, refused, times, clock)

    def _refuse(
        self,
        request: Request,
        error: RequestError,
        times: list[float],
        clock: Callable[[], float],
    ) -> tuple[Answer, Payload]:
        times.append(clock())
        # Requesters that read only the properties get the hint too.
        message = one_line(str(error) if error.hint is None else f"{error} ({error.hint})")
        body = AnswerHead(self._name, id=request.id, has_envelope=request.client_json).refusal(error)
        times_us = _durations(request, times)
        return Answer(request.seq, error.status, message, JSON, (), **times_us, bucket=()), body


class Prepared:
    """Everything that must be imported and set up before the sandbox is closed.

    `load` is the agent's first frame. Raises BundleError if the manifest's declarations do not fit together.
    """

    def __init__(self, manifest: Manifest, load: Load, members: Members) -> None:
        self.manifest = manifest
        self.cbor = import_cbor()
        self.preprocessor: Preprocessor | None = None
        if manifest.preprocess is not None:
            spec = next(spec for spec in manifest.smallest_inputs if spec.name == manifest.preprocess.input)
            max_pixels = load.max_pixels or pictures.MAX_PIXELS
            self.preprocessor = Preprocessor(
                manifest.preprocess, spec, max_pixels, manifest.quantised_inputs.get(spec.name)
            )
        self.rows: RowReader | None = None
        if manifest.columns is not None:
            self.rows = RowReader(manifest.columns, manifest.row_inputs, manifest.quantised_inputs)
        labels = members.read("labels.txt").splitlines() if "labels.txt" in members else []
        # What follows a recording is `agent.runtime.audio`'s.
        after = manifest.postprocess if manifest.audio is None else None
        self.postprocessor = Postprocessor(after, manifest.smallest_outputs, labels, manifest.real_outputs)
        self.labels = labels
        self.load = load


def load_kernels(members: Members, threads: int) -> KernelModule:
    """Map the kernel library, whose constructors run: call it after the sandbox's first step.

    Parameters
    ----------
    threads
        Threads of a kernel; 0 for the library's default.

    Raises
    ------
    BundleError
        If the library does not fit this machine.
    """
    kernels = KernelModule.load(members.descriptor("mod.so"))
    if threads:
        kernels.set_threads(threads)
    return kernels


def load_model(prepared: Prepared, members: Members, kernels: KernelModule) -> Model:
    """Load the model and run its recorded samples; call it after the sandbox's second step.

    Raises
    ------
    BundleError
        If the files do not match each other or this machine, or the samples give other results.
    ExecutionError
        If a kernel fails.
    """
    manifest = prepared.manifest
    module: GraphModule | BucketedModule
    if manifest.buckets is None:
        module = create(members.read("mod.json"), kernels)
    else:
        graphs = [Graph.from_json(members.read(name)) for name in manifest.buckets.members()]
        module = BucketedModule(manifest.buckets, manifest.inputs, manifest.outputs, graphs, kernels)
    with members.mapped("mod.params") as params:
        module.load_params(params)
    members.close("mod.params")
    if isinstance(module, GraphModule):
        _check_interface(manifest, module)
    error = 0.0
    if manifest.samples.count:
        with (
            members.mapped("samples/inputs.params") as inputs,
            members.mapped("samples/outputs.params") as outputs,
        ):
            error = check_samples(module, manifest.outputs, manifest.samples, inputs, outputs)
    else:
        # The first run binds every call, and no request should wait for that.
        module.run()
    members.close()
    return Model(prepared, module, error)


def _check_interface(manifest: Manifest, module: GraphModule) -> None:
    shapes, dtypes = module.get_input_info()
    got = [f"{name} {dtypes[name]}{list(shape)}" for name, shape in sorted(shapes.items())]
    expected = [
        f"{spec.name} {spec.dtype}{list(spec.shape)}"
        for spec in sorted(manifest.inputs, key=lambda spec: spec.name)
    ]
    for index in range(min(module.get_num_outputs(), len(manifest.outputs))):
        view, spec = module.output_view(index), manifest.outputs[index]
        got.append(f"{view.dtype}{list(view.shape)}")
        expected.append(f"{spec.dtype}{list(spec.shape)}")
    if got != expected or module.get_num_outputs() != len(manifest.outputs):
        raise FormatError(
            f"mod.json does not match the manifest: expected {expected!s:.200}, got {got!s:.200}"
        )


def _check_deadline(request: Request, now_s: float) -> None:
    if request.deadline_s is not None and now_s >= request.deadline_s:
        late_ms = (now_s - request.deadline_s) * 1e3
        raise DeadlineError(f"the deadline passed {late_ms:.0f} ms before the model was free")


def _durations(request: Request, times: list[float]) -> dict[str, int]:
    # A refused request has fewer times; the last one is when it was refused.
    steps = [max(0, round((after - before) * 1e6)) for before, after in pairwise(times)]
    decode, compute, encode = (*steps, 0, 0, 0)[:3]
    queue = max(0, round((times[0] - request.received_s) * 1e6)) if request.received_s else 0
    return {"queue_us": queue, "decode_us": decode, "compute_us": compute, "encode_us": encode}
