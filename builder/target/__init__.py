"""The device that a model is compiled for: its name, its processor, its vector instructions."""
