"""Families: one folder a tunable kernel. space.py is pure; launch.py runs it on a rank."""
