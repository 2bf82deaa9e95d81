"""Top-1 and top-5 of pictures whose classes are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builder.errors import ModelError
from builder.running.accuracy import Accuracy, Truth, is_right, read_truths, truths_of


def test_a_table_has_labels_or_indices(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text('file,label\na.jpg,dog\n"sub/b, c.jpg", 0\n\n')
    first, second = tmp_path / "a.jpg", tmp_path / "sub/b, c.jpg"
    assert read_truths(table, ["cat", "dog"]) == [Truth(first, "dog", 1), Truth(second, "0", 0)]
    assert read_truths(table, None) == [Truth(first, "dog"), Truth(second, "0", 0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected rows"),
        ("file,label\n", "expected rows"),
        ("a.jpg,bird", ":1: expected a label of the model or a class index, got 'bird'"),
        ("a.jpg", ":1: expected a file and a label, got 1 columns"),
        ("a.jpg,1\nb.jpg,1,2", ":2: expected a file and a label, got 3 columns"),
    ],
)
def test_a_bad_table_names_the_row(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ModelError, match=says):
        read_truths(tmp_path / "t.csv", ["cat", "dog"])


def test_right_answers_are_counted() -> None:
    accuracy = Accuracy()
    scores = np.array([[0, 1, 2, 3, 4, 5, 6]], np.float32)
    for index in (6, 2, 0):
        accuracy.count(*is_right(scores, Truth(Path("x.jpg"), str(index), index)))
    assert (accuracy.pictures, accuracy.top1, accuracy.top5) == (3, 1, 2)
    assert str(accuracy) == "top-1 33.3 %, top-5 66.7 % of 3 pictures"
    accuracy = Accuracy()
    accuracy.count(*is_right(scores[:, :2], Truth(Path("x.jpg"), "0", 0)))
    assert str(accuracy) == "top-1 0.0 % of 1 pictures"
    with pytest.raises(ModelError, match="expected a class below 7, got 7"):
        is_right(scores, Truth(Path("x.jpg"), "7", 7))


def truths(folder: Path, *names: str) -> list[Truth]:
    return [Truth(folder / name, str(at), at, name) for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "paths", "labels"),
    [
        (("a.jpg", "b.jpg"), ("photos/b.jpg", "photos/a.jpg"), ["1", "0"]),
        (("cat/1.jpg", "dog/1.jpg"), ("photos/dog/1.jpg",), ["1"]),
        (("1.jpg", "dog/1.jpg"), ("photos/dog/1.jpg", "photos/cat/1.jpg"), ["1", "0"]),
        (("a.jpg", "a.jpg"), ("photos/a.jpg",), ["0", "1"]),
        (("./a.jpg",), ("photos/../photos/a.jpg",), ["0"]),
    ],
)
def test_a_table_beside_the_folder_of_the_pictures(
    tmp_path: Path, names: tuple[str, ...], paths: tuple[str, ...], labels: list[str]
) -> None:
    found = truths_of([tmp_path / path for path in paths], truths(tmp_path / "tables", *names), "t.csv")
    assert [truth.label for truth in found] == labels
    assert {truth.file for truth in found} == {tmp_path / path for path in paths}


def test_a_row_of_the_file_itself_counts_before_one_of_its_name(tmp_path: Path) -> None:
    rows = [*truths(tmp_path / "other", "a.jpg"), Truth(tmp_path / "photos/a.jpg", "7", 7, "photos/a.jpg")]
    assert [truth.label for truth in truths_of([tmp_path / "photos/a.jpg"], rows, "t.csv")] == ["7"]


def test_a_picture_without_a_row_and_two_with_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"t\.csv has no row for .*c\.jpg"):
        truths_of([tmp_path / "c.jpg"], truths(tmp_path, "a.jpg", "xc.jpg"), "t.csv")
    with pytest.raises(ModelError, match=r"one row for .*x/a\.jpg and .*y/a\.jpg"):
        truths_of([tmp_path / "x/a.jpg", tmp_path / "y/a.jpg"], truths(tmp_path, "a.jpg"), "t.csv")
