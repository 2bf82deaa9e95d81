"""The device that a model is compiled for: name, CPU and vector unit."""
