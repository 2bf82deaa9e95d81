"""Linking of kernels into mod.so for any target, with the launcher that ships in it."""
