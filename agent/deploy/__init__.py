"""Bundles on their way onto the device: pulled, checked, installed, switched, and remembered.

In the order in which data passes them: :mod:`desired` (what should run), :mod:`sources` with :mod:`https` and
:mod:`blocks` (where it comes from), :mod:`store` (where it lies), :mod:`installer` (the steps of one job),
:mod:`jobs` (what became of them), :mod:`deployment` (the queue and the reports), :mod:`local` (the command
line).
"""
