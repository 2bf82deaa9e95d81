"""Executed instructions of one inference on an ARM core that is emulated."""
