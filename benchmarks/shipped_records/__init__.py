"""Makes the tuning records that come with the compiler (docs/shipped-records.md)."""
