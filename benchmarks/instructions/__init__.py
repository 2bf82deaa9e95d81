"""Counts the instructions of one inference on an emulated core."""
