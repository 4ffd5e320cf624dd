"""The runtime: which config to run (`lookup`), and the operator that runs it (`load`). Never tunes.

Importing this package imports nothing: `tktune.lookup` must stay light, and `tktune.load` brings torch.
"""
