"""`infer --accuracy`: the accuracy of a model as a device computes it, on pictures whose content is known."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.running.detection_accuracy import Detection
    from edgebundle.answer import Answer
    from edgebundle.broker import Broker


async def infer_accuracy(args: argparse.Namespace, broker: Broker, names: list[str]) -> int:
    """Ask about each picture of a table or of annotations, and print how often the answers are right."""
    from builder.errors import ModelError
    from builder.running.accuracy import Accuracy, read_rows
    from builder.running.detection_accuracy import DetectionAccuracy
    from builder.running.input_files import input_files
    from edgebundle.async_client import AsyncClient

    detections = DetectionAccuracy(args.accuracy) if args.accuracy.endswith(".json") else None
    rows = {} if detections is not None else {row.file: row.label for row in read_rows(args.accuracy)}
    files = detections.files if detections is not None else list(rows)
    if names:
        files = input_files(names)
        if detections is not None:
            files = [file for file in files if detections.has(file)]
        if not files or any(file not in rows for file in files if detections is None):
            raise ModelError(f"--accuracy: {args.accuracy} does not have the pictures of {', '.join(names)}")
    accuracy = Accuracy()
    async with AsyncClient(broker) as client:
        model = client.model(args.agent, args.model)
        place = 0
        async for answer in model.map(files, deadline_s=args.deadline):
            if detections is not None:
                detections.add(files[place], _detections(answer))
            else:
                accuracy.count(*_hits(answer, rows[files[place]]))
            place += 1
    if args.json:
        print(json.dumps({"accuracy": accuracy.document() if detections is None else detections.document()}))
    else:
        print(accuracy if detections is None else detections)
    return 0


def _hits(answer: Answer, label: str) -> tuple[bool, bool]:
    """Return whether the right class is the best one, and whether it is among the five best."""
    from builder.errors import ModelError

    best = answer.labels[:5]
    if not best:
        raise ModelError(
            f"{answer.model}: expected an answer with classes, got none",
            hint="declare them: edgebundle repack BUNDLE --postprocess softmax,top5",
        )
    right = [label in (each.label, str(each.index)) for each in best]
    return right[0], any(right)


def _detections(answer: Answer) -> list[Detection]:
    from builder.errors import ModelError
    from builder.running.detection_accuracy import Detection

    if not answer.lists("classes"):
        raise ModelError(
            f"{answer.model}: expected an answer with boxes, got none",
            hint="declare how the model's outputs are decoded (docs/your-detector.md)",
        )
    return [Detection(b.label, b.index, b.score, (b.x0, b.y0, b.x1, b.y1)) for b in answer.boxes]
