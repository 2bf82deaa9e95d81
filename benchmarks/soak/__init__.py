"""`make soak`: the agent for hours, with and without faults, with every answer counted."""
