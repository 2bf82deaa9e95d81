"""Passes over the graph, before fusion: each takes a Relax module and returns another that computes the same.

A change belongs here if it looks at more than one operator, or decides in which form a value is stored. The
order of one function's loops belongs in `spaces`. To add a pass, write it over
`builder.kernels.rewriter.rewrite_main`, and call it in `builder.compiling.lower.fuse`. To add a tensor
expression for one operator, write it in `spaces` and name it in `legalise`.
"""
