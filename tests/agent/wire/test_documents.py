"""Each document: what is written is read again, limits hold, bad input is an error or counts as absent."""

from __future__ import annotations

import contextlib
import json
import string
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import BundleError, EndlessDataError, FormatError
from agent.wire import document
from agent.wire.blocks import MAX_BLOCK_BYTES, MAX_COUNT, MAX_WANT_BYTES, Want
from agent.wire.desired import Desired, DesiredModel, find_version
from agent.wire.info import Capabilities, Hardware, Info, Software
from agent.wire.job import JobState, Result, Status, Step
from agent.wire.metrics import format_metrics, parse_metrics
from agent.wire.model_state import ModelPhase, ModelState
from agent.wire.presence import UNKNOWN, AgentState, Presence
from agent.wire.reported import Origin, Rejection, Reported, ReportedModel, ServiceState
from agent.wire.tensors import JsonTensor, format_tensor, parse_spec, parse_tensor, spec_document

DIGEST = "sha256:" + "ab" * 32

texts = st.text(max_size=20)
integers = st.integers(0, document.MAX_SAFE_INTEGER)
# Built from characters and numbers: drawing from a regular expression takes several times as long.
LETTERS = string.ascii_lowercase + string.digits
names = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + "._-", max_size=20))
digests = st.integers(0, (1 << 256) - 1).map("sha256:{:064x}".format)
specs = st.builds(
    TensorSpec,
    st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters=";"), min_size=1, max_size=20
    ),
    st.sampled_from(["FP32", "INT64", "BOOL", "BYTES"]),
    st.lists(st.integers(0, 50), max_size=4).map(tuple),
)
desired_models = st.builds(
    DesiredModel,
    model=names,
    digest=digests,
    size=st.integers(1, 1 << 31),
    version=st.builds("{}.{}.{}".format, *[st.integers(0, 9)] * 3),
    job=names,
    sources=st.lists(st.sampled_from(["mqtt", "https://a.example/b"]), min_size=1, max_size=8).map(tuple),
)
desired = st.builds(
    Desired,
    version=integers,
    models=st.lists(desired_models, max_size=3, unique_by=(lambda m: m.model, lambda m: m.job)).map(tuple),
    base=st.none() | digests,
)
reported_models = st.builds(
    ReportedModel,
    name=names,
    digest=digests,
    version=texts,
    state=st.sampled_from(ServiceState),
    origin=st.sampled_from(Origin),
    job=texts,
    previous=st.none() | digests,
    security_counter=st.none() | integers,
)
DOCUMENTS: dict[type[Any], st.SearchStrategy[Any]] = {
    Presence: st.builds(Presence, st.sampled_from(AgentState), integers, texts),
    Info: st.builds(
        Info,
        device=texts,
        agent=texts,
        hardware=st.builds(Hardware, features=st.lists(texts, max_size=3).map(tuple)),
        compatible=st.lists(texts, max_size=3).map(tuple),
        software=st.builds(Software),
        capabilities=st.builds(Capabilities, groups=st.lists(texts, max_size=3).map(tuple)),
    ),
    ModelState: st.builds(
        ModelState,
        name=names,
        version=st.text(min_size=1, max_size=10),
        inputs=st.lists(specs, max_size=3).map(tuple),
        outputs=st.lists(specs, max_size=3).map(tuple),
        state=st.sampled_from(ModelPhase),
        postprocess=st.lists(texts, max_size=3).map(tuple),
    ),
    Desired: desired,
    JobState: st.builds(
        JobState,
        id=texts,
        status=st.sampled_from(Status),
        step=st.none() | st.sampled_from(Step),
        result=st.none() | st.sampled_from(Result),
        progress=st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
        time_s=st.integers(0, 4_000_000_000).map(float),
    ),
    Reported: st.builds(
        Reported,
        desired=st.none() | desired.map(lambda value: replace(value, base=None)),
        models=st.lists(reported_models, max_size=3, unique_by=lambda m: m.name).map(tuple),
        error=st.none() | st.builds(Rejection, texts.filter(bool), texts, st.none() | integers),
    ),
    Want: st.builds(
        Want,
        offset=integers,
        count=st.integers(1, MAX_COUNT),
        block_bytes=st.integers(1, MAX_BLOCK_BYTES),
        seq=st.integers(1, document.MAX_SAFE_INTEGER),
    ),
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
EXAMPLES: dict[type[Any], Any] = {
    Presence: Presence(AgentState.ONLINE, 7, "1.0.0"),
    Info: Info("kitchen", "1.0.0", Hardware("aarch64", "a board", features=("neon",)), ("linux-aarch64",)),
    ModelState: ModelState(
        name="digits",
        version="1.0.0",
        inputs=(TensorSpec("x", "FP32", (1, 4)),),
        outputs=(TensorSpec("y", "FP32", (1, 10)),),
        ready=True,
        state=ModelPhase.READY,
        message="",
        security_counter=3,
        digest=DIGEST,
        key_id="ab",
        image_input="x",
        postprocess=("softmax", "topk"),
    ),
    Desired: Desired(7, (DesiredModel("digits", DIGEST, 10, "1.0.0", "j1", ("mqtt",)),), DIGEST),
    JobState: JobState(id="j1", model="digits", digest=DIGEST, status=Status.IN_PROGRESS, step=Step.TESTING),
    Reported: Reported(None, (), Rejection("ERR_CONFLICT", "why", 3)),
    Want: Want(65536, 2, 65536, 3),
}
STRICT = (Desired, Want)
TOLERANT = tuple(kind for kind in DOCUMENTS if kind not in STRICT)
every = pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
tolerant = pytest.mark.parametrize("kind", TOLERANT, ids=lambda kind: kind.__name__)
strict = pytest.mark.parametrize("kind", STRICT, ids=lambda kind: kind.__name__)


@pytest.mark.slow
@every
@given(data=st.data())
def test_what_is_written_is_read_again(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(DOCUMENTS[kind])
    raw = value.to_bytes()
    assert kind.from_bytes(raw) == value
    assert kind.from_bytes(raw).to_bytes() == raw
    assert hash(value) is not None, "frozen"


@every
def test_document_types_are_frozen_and_have_slots(kind: type[Any]) -> None:
    assert "__slots__" in vars(kind)
    with pytest.raises(AttributeError):
        setattr(EXAMPLES[kind], fields(kind)[0].name, None)


@given(raw=st.binary(max_size=100) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_document_or_an_error(raw: bytes) -> None:
    for kind in DOCUMENTS:
        with contextlib.suppress(BundleError):
            assert isinstance(kind.from_bytes(raw), kind)


@pytest.mark.slow
@given(value=JSON_VALUES)
def test_any_value_of_any_key_is_a_document_or_an_error(value: Any) -> None:
    for kind in DOCUMENTS:
        whole = json.loads(EXAMPLES[kind].to_bytes())
        for key in whole:
            with contextlib.suppress(BundleError):
                assert isinstance(kind.from_bytes(json.dumps({**whole, key: value}).encode()), kind)


@every
@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b"1", b'"x"', b"\xff\xfe", b"{", b"[" * 100_000, b"1" * 5000]
)
def test_what_is_not_a_json_object_is_refused(kind: type[Any], raw: bytes) -> None:
    with pytest.raises(BundleError):
        kind.from_bytes(raw)


@every
def test_document_over_its_limit_is_refused_before_it_is_parsed(kind: type[Any]) -> None:
    with pytest.raises(EndlessDataError, match="expected at most"):
        kind.from_bytes(b" " * (document.MAX_AGENT_DOCUMENT_BYTES + 1))
    with pytest.raises(EndlessDataError, match="expected at most"):
        kind.from_bytes(b'{"x":[' + b",".join([b"[]"] * document.MAX_AGENT_DOCUMENT_VALUES) + b"]}")


@strict
def test_strict_readers_refuse_unknown_missing_and_duplicate_keys(kind: type[Any]) -> None:
    raw = EXAMPLES[kind].to_bytes()
    whole = json.loads(raw)
    with pytest.raises(FormatError):
        kind.from_bytes(json.dumps({**whole, "more": 1}).encode())
    for key in whole.keys() - {"base"}:
        with pytest.raises(FormatError):
            kind.from_bytes(json.dumps({name: whole[name] for name in whole if name != key}).encode())
        pair = f"{json.dumps(key)}:{json.dumps(whole[key])}".encode()
        with pytest.raises(FormatError, match=f"duplicate key '{key}'"):
            kind.from_bytes(raw[:-1] + b"," + pair + b"}")
    with pytest.raises(FormatError, match="NaN is not a JSON number"):
        kind.from_bytes(raw[:-1] + b',"more":NaN}')


@tolerant
def test_tolerant_readers_ignore_what_a_later_version_adds(kind: type[Any]) -> None:
    whole = json.loads(EXAMPLES[kind].to_bytes())
    assert kind.from_bytes(json.dumps({**whole, "more": [1]}).encode()) == EXAMPLES[kind]


@tolerant
@pytest.mark.parametrize("wrong", [None, True, 1, 1.5, "x", [], [1], {}, {"x": 1}, 10**400])
def test_tolerant_readers_take_a_value_of_another_type_as_absent(kind: type[Any], wrong: Any) -> None:
    whole = json.loads(EXAMPLES[kind].to_bytes())
    for key in whole.keys() - {"status", "step", "result", "desired"}:
        kind.from_bytes(json.dumps({**whole, key: wrong}).encode())


def test_text_of_a_tolerant_reader_is_bounded() -> None:
    assert len(Presence.from_bytes(json.dumps({"state": "x" * 5000}).encode()).state) == 1024


def test_absent_state_is_unknown() -> None:
    assert Presence.from_bytes(b"{}") == Presence(UNKNOWN, 0, "")


def test_model_state_of_an_older_agent_has_its_version_in_versions() -> None:
    assert ModelState.from_bytes(b'{"versions":["2.0.0","1.0.0"]}').version == "2.0.0"


def test_tensor_that_is_not_one_is_left_out_of_a_model_state() -> None:
    raw = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1]},{"name":1},7,{"name":"y","datatype":"F"}]}'
    assert ModelState.from_bytes(raw).inputs == (TensorSpec("x", "FP32", (1,)),)


@pytest.mark.parametrize("key", ["status", "step", "result"])
@pytest.mark.parametrize("word", ["DONE", "", 1, ["x"], {}])
def test_job_with_an_unknown_word_is_an_error(key: str, word: Any) -> None:
    whole = json.loads(EXAMPLES[JobState].to_bytes())
    with pytest.raises(FormatError, match=f"expected a job {key}"):
        JobState.from_bytes(json.dumps({**whole, key: word}).encode())


@pytest.mark.parametrize(("written", "read"), [(-1, 0.0), (2, 1.0), ("1", 0.0), (True, 0.0), (0.5, 0.5)])
def test_progress_of_a_job_is_a_fraction(written: Any, read: float) -> None:
    whole = json.loads(EXAMPLES[JobState].to_bytes())
    assert JobState.from_bytes(json.dumps({**whole, "progress": written}).encode()).progress == read


def test_final_statuses_are_all_but_the_first_two() -> None:
    assert [status for status in Status if not status.final] == [Status.QUEUED, Status.IN_PROGRESS]


def test_report_with_an_unreadable_desired_document_is_an_error() -> None:
    whole = json.loads(EXAMPLES[Reported].to_bytes())
    with pytest.raises(FormatError, match="desired document"):
        Reported.from_bytes(json.dumps({**whole, "desired": {"version": 1}}).encode())


@pytest.mark.parametrize(
    ("raw", "version"),
    [
        (b'{"version":7,"models":{"x":1}}', 7),
        (b'{"version":-1}', 0),
        (b'{"version":true}', 0),
        (b'{"version":9007199254740991}', 0),
        (b"{}", 0),
        (b"[]", 0),
        (b"rubbish", 0),
    ],
)
def test_version_of_an_unreadable_desired_document_is_found(raw: bytes, version: int) -> None:
    assert find_version(raw) == version


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"offset": 1 << 53},
        {"offset": 1.0},
        {"offset": True},
        {"offset": None},
        {"count": 0},
        {"count": MAX_COUNT + 1},
        {"block_bytes": 0},
        {"block_bytes": MAX_BLOCK_BYTES + 1},
        {"seq": 0},
        {"seq": "1"},
    ],
)
def test_want_out_of_its_ranges_is_refused(changes: dict[str, Any]) -> None:
    whole = json.loads(EXAMPLES[Want].to_bytes())
    with pytest.raises(FormatError, match="expected an integer from"):
        Want.from_bytes(json.dumps({**whole, **changes}).encode())


def test_want_has_its_own_limit() -> None:
    raw = EXAMPLES[Want].to_bytes()
    assert Want.from_bytes(raw.ljust(MAX_WANT_BYTES)) == EXAMPLES[Want]
    with pytest.raises(EndlessDataError):
        Want.from_bytes(raw.ljust(MAX_WANT_BYTES + 1))


def test_metrics_are_written_without_nan_and_read_again() -> None:
    values = {'edge_x{model="a"}': 1, "edge_y": 0.25}
    raw = format_metrics({**values, "edge_nan": float("nan"), "edge_inf": float("inf")})
    assert parse_metrics(raw) == values
    assert type(parse_metrics(raw)['edge_x{model="a"}']) is int


@pytest.mark.parametrize(
    "raw", [b"[]", b'{"a":"1"}', b'{"a":true}', b'{"a":null}', b'{"a":NaN}', b'{"a\\u001b":1}', b"rubbish"]
)
def test_other_metrics_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        parse_metrics(raw)


@pytest.mark.slow
@given(specs)
def test_tensor_is_written_and_read_in_a_property_and_in_json(spec: TensorSpec) -> None:
    assert parse_tensor(format_tensor(spec.name, spec.datatype, spec.shape)) == spec
    assert parse_spec(json.loads(json.dumps(spec_document(spec)))) == spec
    tensor = JsonTensor(spec, [1, [2]], "image/png")
    assert JsonTensor.from_document(json.loads(json.dumps(tensor.to_document()))) == tensor


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "x;FP32",
        "x;FP32;1;2",
        ";FP32;1",
        "x;fp32;1",
        "x;FP99;1",
        "x;FP32;-1",
        "x;FP32;01",
        "x;FP32;1,",
    ],
)
def test_other_tensor_properties_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a tensor|tensor '"):
        parse_tensor(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"name": "x"},
        {"name": "x", "datatype": "FP32", "shape": [1]},
        {"name": "x", "datatype": "FP32", "shape": "1", "data": []},
        {"name": 1, "datatype": "FP32", "shape": [1], "data": [1]},
        {"name": "x", "datatype": "FP32", "shape": [True], "data": [1]},
    ],
)
def test_other_json_tensors_are_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        JsonTensor.from_document(value)


def test_shapes_that_change_are_written_with_their_bounds() -> None:
    state = replace(
        EXAMPLES[ModelState],
        inputs=(TensorSpec("ids", "INT64", (1, 512)), TensorSpec("x", "FP32", (4,))),
        outputs=(TensorSpec("y", "FP32", (1, 10)),),
        smallest_inputs=((1, 1), (4,)),
        smallest_outputs=((1, 10),),
    )
    written = json.loads(state.to_bytes())
    assert written["inputs"] == [
        {"name": "ids", "datatype": "INT64", "shape": [1, -1], "shape_min": [1, 1], "shape_max": [1, 512]},
        {"name": "x", "datatype": "FP32", "shape": [4]},
    ]
    assert written["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 10]}]
    assert ModelState.from_bytes(state.to_bytes()) == replace(state, smallest_outputs=())


@pytest.mark.parametrize("smallest", [[1], [1, 600], [-1, 1], "1,1", [1, True], [1, 1.0], None, [1, [1]]])
def test_bounds_that_are_not_valid_count_as_absent(smallest: object) -> None:
    tensor = {
        "name": "ids",
        "datatype": "INT64",
        "shape": [1, -1],
        "shape_min": smallest,
        "shape_max": [1, 512],
    }
    document = json.loads(EXAMPLES[ModelState].to_bytes()) | {"inputs": [tensor]}
    state = ModelState.from_bytes(json.dumps(document).encode())
    assert state.inputs == (TensorSpec("ids", "INT64", (1, 512)),)
    assert state.smallest_inputs == ()
