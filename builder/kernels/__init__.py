"""CPU kernels: what operators become, and how their loops are ordered.

The order in which a model passes through: `canonical` (one spelling for each operator, batch norm folded),
`layouts` (packed channels for the graph as a whole; convolutions and matmuls become our own tensor
expressions), `legalise` (what is left), fusion by TVM, then `schedule`, which hands each function to the
design space of its anchor. One file for each kind of operator; `docs/design-spaces.md` says how to add one.
"""
