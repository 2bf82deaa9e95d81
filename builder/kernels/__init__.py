"""CPU kernels: the functions that a model's operators become, and the order of their loops.

A model passes through, in this order:

1. `passes`, over the whole graph: convolutions of other kinds become two-dimensional (`convolutions`), each
   operator gets one form (`canonical`), operators that an exporter decomposed are put together again
   (`recognise`), channels are packed and convolutions and matrix products become our tensor expressions
   (`layouts`), and so does every operator that is left (`legalise`);
2. operator fusion, which is TVM's;
3. `schedule`, for each fused function: it hands the function to the design space of its anchor (`spaces`),
   whose decisions come from a record, from a search or from the heuristic (`decisions`);
4. `postprocessing`, for each scheduled function: prefetches, and no threads where they do not pay.

`design_space` shows the same spaces to a search. `docs/design-spaces.md` says how to add an operator.
"""
