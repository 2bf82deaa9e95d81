"""Bundles on their way onto the device: pulled, checked, installed, switched, and remembered.

In the order in which data passes them: `desired` (what should run), `sources` with `https` and
`blocks` (where it comes from), `store` (where it lies), `installer` (the steps of one job),
`jobs` (what became of them), `deployment` (the queue and the reports), `local` (the command
line).
"""
