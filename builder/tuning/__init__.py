"""Tuning: measure many schedules of each kernel on real boards, keep the best, and never end up slower.

A run passes through the rooms in this order::

    tuner           conducts the run: `tune` takes a model and returns its records
    ├── tasks/          which kernels of the model can be tuned, and how far each task has got
    ├── search/         which points of a design space to measure next
    ├── candidates/     a point becomes a shared object, and then a time
    │                       (builder.boards measures, builder.records keeps the result)
    ├── verdicts/       tuned against untuned, timed in turn: what compiling may use
    └── views/          what a person sees: a live table, lines, a report

`options` says what to search for and how long, `context` is what the steps of a run share, and `interruption`
defers Ctrl-C. The points of a kernel are `builder.kernels.design_space`. `docs/tuning.md` is the guide.
"""
