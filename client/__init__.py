"""The private side: the only place that sees data.

``site.Site`` carries out a plan and returns a release; ``app`` is the Flower shim in front of it; ``dpsgd`` is the
mechanism. Imports ``common`` and never ``server`` or ``simulations``. Start at ``site``.
"""
