"""Everything that pretends or measures: simulated sites, grids, data to play with, benchmarks, reports, the command.

May import all; nothing imports it. Start at ``run``.
"""
