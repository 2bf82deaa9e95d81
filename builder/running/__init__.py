"""Running a bundle on the workstation."""
