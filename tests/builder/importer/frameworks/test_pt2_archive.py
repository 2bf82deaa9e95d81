"""Files of PyTorch are looked into without PyTorch; what could run code never reaches it."""

from __future__ import annotations

import pathlib
import random
import zipfile
from collections import OrderedDict
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.importer.frameworks import pt2_archive
from builder.importer.frameworks.pt2_archive import check_pt2, describe_pt, rewrite_pt2
from tests.builder.importer.frameworks.archive import write_pt, write_pt2

# As PyTorch 2.14 and 2.5 write sizes of dimensions.
ARITHMETIC = (
    "s77",
    "2*s0 + 1",
    "Symbol('s77', positive=True, integer=True)",
    "Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(-1))",
    "GreaterThan(Symbol('u0', integer=True), Integer(2))",
    "((s0 - 1)//2) + Max(1, s1)",
    "FloorDiv(Symbol('s0', integer=True), Integer(2))",
)
CODE = (
    "__import__('os').system('touch x')",
    "().__class__.__mro__",
    "open('/etc/passwd')",
    "exec('1')",
    "Symbol('s0').func('x')",
    "[1 for _ in 'x']",
    "lambda: 1",
    'Symbol("s0")',
    "eval ('1')",
    "s0\n+1",
    "2eval(s0)",
    "s" * 1_000_000,  # in time that grows with its length, not with its square
)


@pytest.mark.parametrize("kind", ["models", "old"])
def test_a_program_passes(tmp_path: Path, kind: str) -> None:
    check_pt2(write_pt2(tmp_path / "m.pt2", kind=kind))


@pytest.mark.parametrize("expression", ARITHMETIC)
def test_sizes_that_are_arithmetic_pass(tmp_path: Path, expression: str) -> None:
    check_pt2(write_pt2(tmp_path / "m.pt2", expression=expression))


@pytest.mark.parametrize("expression", CODE, ids=range(len(CODE)))
def test_sizes_that_are_code_are_refused(tmp_path: Path, expression: str) -> None:
    with pytest.raises(ModelError, match="expected arithmetic as the size of a dimension") as caught:
        check_pt2(write_pt2(tmp_path / "m.pt2", expression=expression))
    assert "\n" not in str(caught.value)


def test_pickled_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"got 'first\.weight' as a pickled object"):
        check_pt2(write_pt2(tmp_path / "m.pt2", pickled=True))


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pt2_archive, "MAX_JSON_BYTES", 1 << 20)
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/models/model.json", b" " * (2 << 20))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(ModelError, match="expected compressed members of at most"):
        check_pt2(path)


@pytest.mark.parametrize("name", ["m/models/model.json", "m/MODELS/Model.JSON", "m/models/model.json\0.txt"])
def test_members_that_pytorch_takes_for_each_other_are_refused(tmp_path: Path, name: str) -> None:
    path = write_pt2(tmp_path / "m.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/models/model.json", "{}")
        info = zipfile.ZipInfo("m/models/other")
        info.filename = info.orig_filename = name  # the class itself cuts names at a NUL
        with pytest.warns(UserWarning, match="Duplicate") if name == "m/models/model.json" else nullcontext():
            archive.writestr(info, "{}")
    with pytest.raises(ModelError, match="expected members with different names"):
        check_pt2(path)


@pytest.mark.parametrize("text", [b"{}", b"[]", b'""'])
def test_documents_that_would_fill_the_memory_are_refused(tmp_path: Path, text: bytes) -> None:
    path = write_pt2(tmp_path / "m.pt2")
    whole = b"[" + b",".join([text] * (1 << 19)) + b"]"
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"m/{number}.json", whole)
    with pytest.raises(ModelError, match=r"times . in JSON, got more"):
        check_pt2(path)


def test_many_documents_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pt2_archive, "MAX_JSON_BYTES", 4000)
    path = write_pt2(tmp_path / "m.pt2")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5):
            archive.writestr(f"m/{number}.json", b" " * 1000)
    with pytest.raises(ModelError, match="bytes of JSON, got more"):
        check_pt2(path)


def test_an_archive_is_written_anew(tmp_path: Path) -> None:
    """What stands before an archive, such as another one, does not reach PyTorch."""
    path = write_pt2(tmp_path / "m.pt2")
    other = write_pt2(tmp_path / "other.pt2", expression=CODE[0]).read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    path.write_bytes(other + path.read_bytes())
    check_pt2(path)
    rewrite_pt2(path, tmp_path / "new.pt2")
    with zipfile.ZipFile(tmp_path / "new.pt2") as archive:
        assert {info.filename: archive.read(info) for info in archive.infolist()} == members
    assert CODE[0].encode() not in (tmp_path / "new.pt2").read_bytes()


def test_a_damaged_member_is_not_copied(tmp_path: Path) -> None:
    path = write_pt2(tmp_path / "m.pt2")
    whole = path.read_bytes()
    at = whole.index(b"pt2", whole.index(b"archive_format"))
    path.write_bytes(whole[:at] + b"pt3" + whole[at + 3 :])
    with pytest.raises(ModelError, match="got a damaged file"):
        rewrite_pt2(path, tmp_path / "new.pt2")


@pytest.mark.parametrize(
    ("kind", "expected"), [("aotinductor", "compiled code of AOTInductor"), ("none", "another archive")]
)
def test_other_archives_are_named(tmp_path: Path, kind: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        check_pt2(write_pt2(tmp_path / "m.pt2", kind=kind))


def test_cut_and_flipped_files_get_one_line(tmp_path: Path) -> None:
    whole = write_pt2(tmp_path / "m.pt2", expression="2*s0").read_bytes()
    rng = random.Random(0)
    path = tmp_path / "damaged.pt2"
    refused = 0
    for at in range(300):
        damaged = bytearray(whole)
        if at % 3 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        for _ in range(at % 5):
            if damaged:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            check_pt2(path)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 400
    assert refused > 150


def test_what_a_pt_file_is(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    weights = describe_pt(write_pt(path, OrderedDict(a=1)))
    assert "weights without a model (a state_dict)" in str(weights)
    assert f"model.load_state_dict(torch.load('{path}', weights_only=True))" in str(weights.hint)
    foreign = describe_pt(write_pt(path, Fraction(1, 2)))
    assert "a pickled object (fractions.Fraction)" in str(foreign)
    assert "only if you trust it" in str(foreign.hint)
    assert "got TorchScript" in str(describe_pt(write_pt(path, {}, script=True)))
    renamed = describe_pt(write_pt2(path))
    assert renamed.hint == f"mv {path} {tmp_path / 'm.pt2'}"
    path.write_bytes(b"\x80\x02}q\x00.")  # before PyTorch 1.6
    assert "torch.save wrote" in str(describe_pt(path))
    assert "torch.export.save(torch.export.export(" in str(describe_pt(path).hint)
    assert "cannot read" in str(describe_pt(tmp_path / "absent.pt"))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (pathlib.Path.touch, (tmp_path / "touched",))

    describe_pt(write_pt(tmp_path / "m.pt", Hostile()))
    assert not (tmp_path / "touched").exists()
