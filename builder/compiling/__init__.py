"""Compiling: an imported model is lowered, compiled, compared with ONNX Runtime and put into a package."""
