"""Models that only their own framework can read: PyTorch programs, Keras files, SavedModel folders.

A framework runs in a process of its own, with a Python that has it. It exports the model to ONNX and computes
reference outputs; this program never imports it. Leaves reading the ONNX model to the rest of the importer.
"""
