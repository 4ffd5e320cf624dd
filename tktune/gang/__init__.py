"""Measuring in killable rank processes: the gang, its protocol, trials and the noise floor.

Nothing here decides which config is asked next, and nothing here speaks SQL.
"""
