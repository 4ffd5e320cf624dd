"""Artifacts: toolchains, digests, ninja batches and the content-addressed cache. Judges no speed, knows no family."""
