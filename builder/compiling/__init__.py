"""Compiling: lowered, generated, checked against ONNX Runtime, and put into a bundle."""
