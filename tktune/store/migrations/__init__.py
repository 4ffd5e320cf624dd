"""Alembic's script location. Alembic is imported only when a database is created or upgraded."""
