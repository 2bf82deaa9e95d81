"""Code generation: from a lowered module to the graph, the memory plan, machine code and `mod.so`."""
