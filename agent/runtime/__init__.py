"""The graph executor: runs a graph of kernels on its weights, on the workstation and in the worker."""
