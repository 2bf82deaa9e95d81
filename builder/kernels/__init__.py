"""CPU kernels: the functions that a model's operators become, and the order of their loops.

A model passes through, in this order:

1. `passes`, over the whole graph: other convolutions become two-dimensional (`convolutions`), each operator
   gets one form (`canonical`), operators that an exporter decomposed are recombined (`recognise`), channels
   are packed and convolutions and matrix products become our tensor expressions (`layouts`), and the
   remaining operators become tensor expressions, ours or TVM's (`legalise`);
2. TVM's operator fusion;
3. `schedule`, for each fused function: it hands the function to the design space of its anchor (`spaces`),
   whose decisions come from a record, from a search or from the heuristic (`decisions`);
4. `postprocessing`, for each scheduled function: it adds prefetches, and removes threads that do not pay.

`design_space` shows the same spaces to a search. `docs/design-spaces.md` says how to add an operator.
"""
