"""Post-training quantisation: from a float model and calibration data to a model in int8 (QDQ form).

`quantise.quantize` conducts; the other files are its parts, each usable without it.
"""
