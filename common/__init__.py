"""What both sides of a federation must agree on.

Methods, masks, schedules, plans, codings, accounting, models and the run config. NumPy everywhere; torch in ``models``
alone, Flower in ``records`` alone, files in ``datasets`` alone. Imports nothing of ours but itself. Start at ``plan``.
"""
