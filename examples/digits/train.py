"""Train a small convolutional network on scikit-learn's digits and export it to ONNX, with numpy only.

    python examples/digits/train.py                # writes digits.onnx and PNG files to this folder

Three 3x3 convolutions and a linear layer, stochastic gradient descent with momentum. Each picture is randomly
shifted, rotated and scaled in every epoch. Training is seeded: the same machine gives the same file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pictures

Array = NDArray[np.float32]
WIDTH: Final = 32  # channels of the second and third convolution
BATCH: Final = 32


def unfold(x: Array) -> Array:
    """Return the zero-padded 3x3 neighbourhood of each pixel: [n, h, w, c] -> [n, h, w, c * 9]."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.reshape(*x.shape[:3], -1)


def fold(slope: Array, channels: int) -> Array:
    """Return the transpose of `unfold`: the gradient of each pixel, [n, h, w, c * 9] -> [n, h, w, c]."""
    n, h, w, _ = slope.shape
    taps = slope.reshape(n, h, w, channels, 3, 3)
    x = np.zeros((n, h + 2, w + 2, channels), np.float32)
    for i in range(3):
        for j in range(3):
            x[:, i : i + h, j : j + w] += taps[..., i, j]
    return x[:, 1:-1, 1:-1]


class Network:
    """Conv-ReLU, conv-ReLU, 2x2 maximum, conv-ReLU, linear; convolution weights are [c * 9, o]."""

    def __init__(self, rng: np.random.Generator) -> None:
        shapes = [(9, 16), (9 * 16, WIDTH), (9 * WIDTH, WIDTH), (16 * WIDTH, 10)]
        self.weights = [(rng.standard_normal(s) * np.sqrt(2 / s[0])).astype(np.float32) for s in shapes]
        self.biases = [np.zeros(s[1], np.float32) for s in shapes]
        self.speeds = [np.zeros_like(value) for value in self.weights + self.biases]

    def forward(self, x: Array) -> tuple[Array, ...]:
        """Return the logits [n, 10], then the values that the backward pass needs."""
        (w1, w2, w3, w4), (b1, b2, b3, b4) = self.weights, self.biases
        in1 = unfold(x)
        out1 = np.maximum(in1 @ w1 + b1, 0)
        in2 = unfold(out1)
        out2 = np.maximum(in2 @ w2 + b2, 0)
        blocks = out2.reshape(len(x), 4, 2, 4, 2, WIDTH)
        in3 = unfold(blocks.max(axis=(2, 4)))
        out3 = np.maximum(in3 @ w3 + b3, 0)
        return out3.reshape(len(x), -1) @ w4 + b4, in1, out1, in2, out2, in3, out3

    def step(self, x: Array, classes: NDArray[np.int64], rate: float) -> float:
        """Take one gradient step, and return the cross entropy before it."""
        n, (_, w2, w3, w4) = len(x), self.weights
        logits, in1, out1, in2, out2, in3, out3 = self.forward(x)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        loss = float(-np.log(odds[np.arange(n), classes]).mean())
        odds[np.arange(n), classes] -= 1
        s4 = odds / n
        s3 = (s4 @ w4.T).reshape(out3.shape) * (out3 > 0)
        pooled = fold(s3 @ w3.T, WIDTH)[:, :, None, :, None]
        blocks = out2.reshape(n, 4, 2, 4, 2, WIDTH)
        won = (blocks == blocks.max(axis=(2, 4), keepdims=True)) & (blocks > 0)
        s2 = (won * pooled).reshape(out2.shape)
        s1 = fold(s2 @ w2.T, 16) * (out1 > 0)
        pairs = ((in1, s1), (in2, s2), (in3, s3), (out3.reshape(n, -1), s4))
        flat = [(a.reshape(-1, a.shape[-1]), s.reshape(-1, s.shape[-1])) for a, s in pairs]
        slopes = [a.T @ s + 1e-4 * w for (a, s), w in zip(flat, self.weights, strict=True)]
        slopes += [s.sum(axis=0) for _, s in flat]
        for value, slope, speed in zip(self.weights + self.biases, slopes, self.speeds, strict=True):
            speed[:] = 0.9 * speed - rate * slope
            value[:] += speed
        return loss


def export(network: Network) -> onnx.ModelProto:
    """Return the network as ONNX: image [1, 1, 8, 8] -> logits [1, 10]."""
    nodes, constants, last = [], [], "image"
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True), start=1):
        if layer < 4:
            weight = weight.reshape(-1, 3, 3, weight.shape[1]).transpose(3, 0, 1, 2)  # noqa: PLW2901 - OIHW
            taken = [last, f"w{layer}", f"b{layer}"]
            nodes.append(helper.make_node("Conv", taken, [f"conv{layer}"], pads=[1] * 4))
            nodes.append(helper.make_node("Relu", [f"conv{layer}"], [f"relu{layer}"]))
        else:  # ONNX flattens [c, h, w], training flattened [h, w, c]
            weight = weight.reshape(4, 4, WIDTH, 10).transpose(2, 0, 1, 3).reshape(-1, 10)  # noqa: PLW2901
            nodes.append(helper.make_node("Flatten", [last], ["flat"]))
            nodes.append(helper.make_node("Gemm", ["flat", "w4", "b4"], ["logits"]))
        last = f"relu{layer}"
        if layer == 2:
            nodes.append(helper.make_node("MaxPool", [last], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]))
            last = "pooled"
        constants += [
            numpy_helper.from_array(np.ascontiguousarray(weight), f"w{layer}"),
            numpy_helper.from_array(bias, f"b{layer}"),
        ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph(nodes, "digits", [image], [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> int:
    """Train, print the accuracy after each epoch, and write the model and the sample pictures."""
    arguments = argparse.ArgumentParser(description="Train on scikit-learn's digits and export ONNX.")
    arguments.add_argument("--epochs", type=int, default=40)
    arguments.add_argument("-o", "--output", type=Path, default=Path(__file__).resolve().parent)
    args = arguments.parse_args()
    rng = np.random.default_rng(pictures.SEED)
    train, classes, held_out, truth = pictures.load()
    network, started = Network(rng), time.monotonic()
    for epoch in range(args.epochs):
        rate = 0.03 * (1 + np.cos(np.pi * epoch / args.epochs))
        x = pictures.preprocess([pictures.jitter(image, rng) for image in train])
        order = rng.permutation(len(x))
        losses = [network.step(x[b], classes[b], rate) for b in np.array_split(order, len(x) // BATCH)]
        right = (network.forward(pictures.preprocess(held_out))[0].argmax(axis=1) == truth).mean()
        seconds = time.monotonic() - started
        print(f"epoch {epoch + 1:2}  loss {np.mean(losses):.4f}  held-out {right:.2%}  {seconds:.0f} s")
    args.output.mkdir(parents=True, exist_ok=True)
    onnx.save(export(network), args.output / "digits.onnx")
    for path in pictures.write_samples(args.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
