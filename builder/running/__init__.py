"""Running a compiled model on this machine."""
