"""Files that are no models for the compiler, told apart by their content and names."""

from __future__ import annotations

from builder.importer.other_files import recognise


def test_a_torchscript_file_is_told_from_other_archives() -> None:
    archive = b"PK\x03\x04" + bytes(26) + b"yolov8n/extra/config.txt"
    assert recognise(archive, "yolov8n.torchscript").what == "a TorchScript file"
    assert recognise(archive, "yolov8n.zip").what == "a zip archive"
