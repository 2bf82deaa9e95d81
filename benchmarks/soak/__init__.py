"""`make soak`: the agent for hours, whole and torn down, with every answer counted."""
