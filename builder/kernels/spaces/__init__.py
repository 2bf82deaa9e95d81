"""Design spaces, one file for each kind of operator, and what they share.

A file holds an operator's tensor expression, the decisions that order its loops, the values that each
decision may take, and the function that applies them. Shared: the register tile (`register_tile`), what is
fused after an anchor (`epilogue`), prefetches (`prefetch`), and functions of vectors (`vector_math`).
`fallback` schedules a function that has no design space. To add one, write the file, add its kind to `SPACES`
in `builder.kernels.schedule`, and follow `docs/design-spaces.md`.
"""
