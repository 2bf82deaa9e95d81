"""Presets of pictures: how the authors of a family of models prepare them.

A preset has fields of `agent.bundle.processing.Preprocess`; `builder.compiling.declarations` makes it fit a
model. Leaves recordings to `builder.compiling.audio_presets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_IMAGENET: Final = {"scale": 1 / 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_SYMMETRIC: Final = {"scale": 1 / 127.5, "mean": [1.0]}
_LETTERBOX: Final = {"resize_mode": "letterbox", "position": "top_left"}
# torchvision's mean and std for ImageNet; the others as published by the models' authors. YOLO's letterboxes
# are grey (114); those of faces are black.
PICTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "imagenet": {"colour": "RGB", **_IMAGENET},
    "imagenet-crop": {
        "colour": "RGB", "resize_mode": "shortest", "resize": [256, 256], "crop": "model", **_IMAGENET,
    },
    "unit": {"scale": 1 / 255},
    "symmetric": _SYMMETRIC,
    "ultraface": {"colour": "RGB", "mean": [127.0], "std": [128.0]},
    "raw": {"colour": "RGB"},
    "raw-bgr": {"colour": "BGR"},
    "yolox": {"colour": "BGR", **_LETTERBOX, "pad": 114},
    "yolov5": {"colour": "RGB", "resize_mode": "letterbox", "pad": 114, "scale": 1 / 255},
    "nanodet": {"colour": "BGR", "mean": [103.53, 116.28, 123.675], "std": [57.375, 57.12, 58.395]},
    "yunet": {"colour": "BGR", **_LETTERBOX},
    "retinaface": {"colour": "BGR", **_LETTERBOX, "mean": [104.0, 117.0, 123.0]},
    "ssd": {"colour": "RGB", "mean": [127.0], "std": [128.0]},
    "detr": {"colour": "RGB", **_IMAGENET},
    "movenet": {"colour": "RGB", "resize_mode": "letterbox"},
    # The grey that becomes 0, and the line's own end.
    "paddleocr": {"colour": "BGR", "resize_mode": "line", "pad": 127, **_SYMMETRIC},
    "easyocr": {"resize_mode": "line", "interpolation": "bicubic", **_SYMMETRIC},
    "clip": {
        "colour": "RGB", "resize_mode": "shortest", "interpolation": "bicubic", "crop": "model",
        "scale": 1 / 255, "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
    },
}  # fmt: skip
# Other names of the same thing.
SAME_PICTURES: Final = {
    "faces": "ultraface", "rtdetr": "unit",
    **dict.fromkeys(("yolov7", "yolov8", "yolov9", "yolov10", "yolo11", "yolo12"), "yolov5"),
}  # fmt: skip
INPUT_PRESETS: Final = (*PICTURES, *SAME_PICTURES)
