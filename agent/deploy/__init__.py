"""How bundles get onto the device: downloaded, verified, installed, activated and reported.

In the order in which data passes them: `deployment` (the desired document, the queue of jobs and the
reports), `fetch` (where a bundle comes from), `store` (what lies on disk), `installer` with `transitions`
(the steps of one job), `jobs` (their journal), `reported` and `outbox` (what the broker is sent),
`inbox` and `local` (bundles installed by hand).
"""
