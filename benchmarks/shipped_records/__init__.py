"""Makes the tuning records that ship with the compiler (docs/shipped-records.md)."""
