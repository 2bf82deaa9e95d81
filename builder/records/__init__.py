"""Tuning records: which schedules were measured to be fastest, and which of them compiling uses.

There are two kinds. Compiling a kernel consults them in this order:

- The user's own records, a folder that `tune` writes: `folder` (the measured points, in MetaSchedule's
  format, appended by `journal`), `meta_json` (their target and versions, and the verdicts), `best_records`
  (those that compiling uses; merging folders). `task` is the kernel that a record belongs to.
- The records shipped with the compiler: `shipped` reads `CORE.json`, which the project's maintainers make
  with `benchmarks.shipped_records`.
"""
