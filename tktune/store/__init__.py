"""The store: every measurement, every verdict, every winner. SQL lives here and nowhere else.

`results.Store` is the one writer; `reader` is the light read path of `tktune.lookup` (no SQLAlchemy on SQLite).
"""
