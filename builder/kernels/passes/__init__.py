"""Passes over the graph before fusion: one spelling for each operator, layouts, legalisation."""
