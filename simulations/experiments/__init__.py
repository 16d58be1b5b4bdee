"""The papers' tables and figures: declarative experiments, one resumable runner, results in a SQLite file.

Every ``*.toml`` here is an experiment: a grid of settings, seeds, and what the paper found. ``definition`` reads it,
``measures`` says what can be measured, ``runner`` carries out what is missing, ``results`` keeps the figures, ``show``
compares them with the paper's, ``cli`` is ``fedsieve experiments``. May import everything; start at ``definition``.
"""
