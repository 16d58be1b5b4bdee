"""The private side: the only place that sees data.

``site.Site`` carries out a plan and returns a release; ``app`` is the Flower shim in front of it; ``mechanisms`` holds
what a site runs for each method, and ``dpsgd`` the loop of noisy steps that most of them share. Imports ``common`` and
never ``server`` or ``simulations``. Start at ``site``.
"""
