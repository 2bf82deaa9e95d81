"""Damaged and hostile files of every format that edgebundle reads on a workstation."""
