"""A lowered module becomes files: the graph, the memory plan, the object code, and `mod.so`."""
