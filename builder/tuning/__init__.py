"""Tuning: measure many schedules of each kernel on real boards, keep the best, and never end up slower.

A run passes through these folders in order::

    tuner           conducts the run: `tune` takes a model and returns its records
    ├── tasks/          which kernels of the model can be tuned, and the state of each in the run
    ├── search/         which points of a design space to measure next
    ├── candidates/     a point becomes a shared object, and then a time
    │                       (builder.boards measures, builder.records keeps the result)
    ├── verdicts/       tuned against untuned, timed alternately: whether compiling may use it
    └── views/          the output for people: a live table, lines of text, a report

`options` holds the settings of the search, `context` the objects that the steps of a run share, and
`interruption` defers Ctrl-C. The points of a kernel come from `builder.kernels.design_space`. The guide is
`docs/tuning.md`.
"""
