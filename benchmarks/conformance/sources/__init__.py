"""Where cases come from: a module a source, which runs in the environment that has its package."""
