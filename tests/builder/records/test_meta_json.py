from __future__ import annotations

from dataclasses import replace

from builder.records.meta_json import BoardTime, Ratio, RecordsMeta, Verdict
from builder.target.device_target import DeviceTarget


def test_meta_comes_back_as_it_was_written(device: DeviceTarget) -> None:
    meta = replace(
        RecordsMeta.new(device),
        peak_gflops=12.5,
        boards={"pi": BoardTime(1.5, 3, 1, 1, 2)},
        verdicts={"1": Verdict((0, 1), Ratio(2.0, 1.0, 2.0, 1.9, 2.1, 21), use=True)},
    )
    assert RecordsMeta.from_text(meta.to_text(), "meta.json") == meta
