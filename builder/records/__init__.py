"""Tuning records: which schedule was measured to be fastest, and what is used of that.

Two kinds, asked in this order when a kernel is compiled:

- The user's own records, a folder that `tune` writes: `folder` (the measured points, in MetaSchedule's
  format, appended by `journal`), `meta_json` (what they are for, and the verdicts), `best_records` (what
  compiling uses of them; merging folders). `task` is the kernel that a record belongs to.
- The records shipped with the compiler: `shipped` reads `CORE.json`, which the project's maintainers make
  with `benchmarks.shipped_records`.
"""
