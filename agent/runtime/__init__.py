"""The graph executor: kernels, graph and weights, on the workstation and in the worker."""
