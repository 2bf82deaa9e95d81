"""Architectures of torchvision and transformers that nobody tuned to, beside ONNX Runtime."""
