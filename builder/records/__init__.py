"""Tuning records: which schedules were measured to be fastest, and which of them compiling uses.

They are a folder that `tune` writes: `folder` (the measured points, in MetaSchedule's format, appended by
`journal`), `meta_json` (their target and versions, and the verdicts), `best_records` (those that compiling
uses; merging folders). `task` is the kernel that a record belongs to.
"""
