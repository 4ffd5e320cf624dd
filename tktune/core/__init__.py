"""The ground every room stands on: problems, routing, schedule tables, spaces, devices, errors.

Nothing here imports torch or numpy at import time, speaks SQL, or knows Optuna.
"""
