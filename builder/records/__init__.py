"""Tuning records that come with the compiler: found once by its maintainers, used without being asked."""
