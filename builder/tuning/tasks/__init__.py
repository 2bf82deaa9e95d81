"""The tasks of a model, and the state of each in a run."""
