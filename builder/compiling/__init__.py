"""Compile an imported model: lower it, generate code, compare it with ONNX Runtime, make a package."""
