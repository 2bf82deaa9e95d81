"""Write models of PyTorch, Keras and TensorFlow with seeded weights; run by a Python that has them.

    python models.py pytorch|keras FOLDER

Imports nothing of edgebundle.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def pytorch(folder: Path) -> None:
    """Write programs."""
    import torch
    import torchvision
    from torch import nn

    def save(name: str, module: Any, *args: Any, **options: Any) -> None:
        torch.export.save(torch.export.export(module, args, **options), folder / f"{name}.pt2")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.register_buffer("places", torch.randn(1, 16, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, ids: Any, mask: Any = None) -> Any:
            x = self.encoder(self.table(ids) + self.places, src_key_padding_mask=mask)
            return {"logits": x.mean(1), "pair": (x[:, 0], ids * 2)}

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 12, 2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(24, 8, batch_first=True)

        def forward(self, x: Any) -> Any:
            y, (h, _) = self.rnn(x)
            return self.gru(y)[0][:, -1], h

    class Yolo(nn.Module):
        """A detector's head, its grid written as tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1))
            self.down, self.head = nn.Conv2d(32, 32, 3, 2, 1), nn.Conv2d(64, 18, 1)
            self.up = nn.Upsample(scale_factor=2)
            self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30], [33, 23]]))

        def forward(self, images: Any) -> Any:
            x = self.stem(images)
            p = self.head(torch.cat([x, self.up(self.down(x))], 1))
            n, _, height, width = p.shape
            p = p.view(n, 3, 6, height, width).permute(0, 1, 3, 4, 2).sigmoid()
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            centre = (p[..., :2] * 2 - 0.5 + torch.stack([x, y], -1)) * 4
            size = (p[..., 2:4] * 2) ** 2 * self.anchors.view(1, 3, 1, 1, 2)
            return torch.cat([centre, size, p[..., 4:]], -1).view(n, -1, 6)

    class Odd(nn.Module):
        """Outputs that are inputs, constants, or the same value twice."""

        def forward(self, x: Any) -> Any:
            y = x.relu() + 3
            return x, y, y, torch.ones(2)

    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count.add_(1)
            return x + self.count

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Inner()

        def forward(self, x: Any) -> Any:
            return self.head(x)

    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.svd(x)[1] + torch.special.i0(x).sum()

    torch.manual_seed(0)
    picture = torch.rand(1, 3, 64, 64)
    save("mobilenet", torchvision.models.mobilenet_v3_small(weights=None).eval(), picture)
    save("encoder", Encoder().eval(), torch.randint(0, 50, (1, 16)))
    save("recurrent", Recurrent().eval(), torch.randn(1, 20, 6))
    save("yolo", Yolo().eval(), picture)
    save("odd", Odd(), torch.randn(2, 3))
    batch = torch.export.Dim("batch", min=1, max=8)
    save("dynamic", nn.Conv2d(3, 4, 3).eval(), torch.rand(2, 3, 8, 8), dynamic_shapes=({0: batch},))
    save("half", nn.Linear(8, 3).half(), torch.randn(2, 8).half())
    save("bfloat16", nn.Linear(8, 3).bfloat16(), torch.randn(2, 8).bfloat16())
    save("state", State(), torch.randn(2))
    save("unknown", Unknown(), torch.randn(4, 4))
    save("training", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), torch.randn(3, 4))
    for backend in ("x86", "xnnpack"):
        for name in ("resnet18", "mobilenet_v2"):
            quantised(name, backend, folder / f"{name}_{backend}.pt2")


def quantised(name: str, backend: str, path: Path) -> None:
    """Write a network of torchvision that PT2E quantised."""
    import torch
    import torchvision
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(weights=None).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # otherwise, activations vanish from layer to layer
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    quantizer: Any
    if backend == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    else:
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

        quantizer = xnnpack.XNNPACKQuantizer()
        quantizer.set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
    inputs = (torch.randn(1, 3, 64, 64),)
    prepared = prepare_pt2e(torch.export.export(network, inputs, strict=True).module(), quantizer)
    prepared(torch.randn(1, 3, 64, 64))
    torch.export.save(torch.export.export(convert_pt2e(prepared), inputs), path)


def keras(folder: Path) -> None:
    """Write models of Keras, and with TensorFlow folders of SavedModels."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)

    def convolutions() -> Any:
        image = keras.Input((32, 32, 3), name="image")
        x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(image)
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        x = layers.GlobalAveragePooling2D()(layers.DepthwiseConv2D(3, padding="same")(x))
        return keras.Model(image, layers.Dense(5, activation="softmax", name="probs")(x))

    def recurrent() -> Any:
        return keras.Sequential(
            [keras.Input((16, 6)), layers.LSTM(12, return_sequences=True), layers.GRU(7), layers.Dense(3)]
        )

    def several() -> Any:
        a, b = keras.Input((8,), name="a"), keras.Input((5,), name="tokens", dtype="int32")
        x = layers.Concatenate()([a, layers.Flatten()(layers.Embedding(20, 4)(b))])
        return keras.Model([a, b], {"s": layers.Dense(2)(x), "t": layers.Dense(3, activation="tanh")(x)})

    def augmenting() -> Any:
        kept = [layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(5)]
        return keras.Sequential(
            [keras.Input((16, 16, 3)), layers.RandomFlip(), layers.RandomRotation(0.1), *kept]
        )

    def typed(policy: str, last: str | None, kind: str = "uint8") -> Any:
        """A network whose layers compute in a type, and whose input and last layer have their own."""
        image = keras.Input((12, 12, 3), name="image", dtype=kind)
        x = layers.Rescaling(1 / 255, dtype=policy)(image)
        x = layers.Conv2D(6, 3, activation="relu", dtype=policy)(x)
        x = layers.BatchNormalization(dtype=policy)(x)
        inner = keras.Sequential([keras.Input((100, 6)), layers.LayerNormalization(dtype=policy)])
        x = inner(layers.Reshape((100, 6), dtype=policy)(x))
        x = layers.MultiHeadAttention(2, 4, dtype=policy)(x, x)
        x = layers.LSTM(5, dtype=policy)(x)
        x = layers.Dense(3, activation="softmax", dtype=last or policy, name="probs")(x)
        return keras.Model(image, x)

    made: dict[str, Callable[[], Any]] = {
        "mixed_float16": lambda: typed("mixed_float16", "float32"),
        "mixed_bfloat16": lambda: typed("mixed_bfloat16", None),
        "float16": lambda: typed("float16", None, "float16"),
        "bfloat16_input": lambda: typed("mixed_float16", "float32", "bfloat16"),
        "float64": lambda: typed("float64", None, "float32"),
        "long_integers": lambda: typed("float64", None, "int32"),
        "augmenting": augmenting,
        "convolutions": convolutions,
        "recurrent": recurrent,
        "several": several,
    }
    for name, make in made.items():
        model = make()
        model.save(folder / f"{name}.keras")
        model.save(folder / f"{name}.h5")
        if keras.backend.backend() == "tensorflow":
            model.export(folder / name, verbose=False)
    code = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2)])
    code.save(folder / "code.keras")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    {"pytorch": pytorch, "keras": keras}[sys.argv[1]](Path(sys.argv[2]))
