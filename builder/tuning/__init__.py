"""Tuning: measure many schedules of each kernel on real boards, keep the best, and never end up slower.

The order in which a run passes through: `tasks` (what there is to tune), `space` (a kernel's points),
`search` (which to try next), `build` (a candidate becomes a shared object), `measuring` (a killable process
that times it, here or on a board), `boards` (which board when, and what becomes of one that fails),
`records` (what is kept), `verdicts` (tuned against untuned, interleaved), `best` (what compiling uses), with
`tuner` conducting; `live` and `report` show it. `docs/tuning.md` leads through it.
"""
