"""One file a schema version, in order. A released one is never edited."""
