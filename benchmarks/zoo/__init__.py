"""Architectures of torchvision and transformers without tuning records of their own, beside ONNX Runtime."""
