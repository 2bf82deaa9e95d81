"""One local page of a fleet: what runs where, pictures on models, deployments.

The page is in `page/`: plain modules of JavaScript without a framework, as they are served. The credentials
of the broker stay in this process. docs/dashboard.md describes the page and its guards.
"""
