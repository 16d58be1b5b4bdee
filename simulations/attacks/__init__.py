"""Attacks on what a site really uploads: what a server that is too curious could see.

``victim`` asks a real site for a real release and decodes it as the server does; ``inversion`` looks for the pictures
behind it by matching gradients, ``linear`` solves for them; ``pictures`` compares pictures, ``page`` shows them,
``cli`` is ``fedsieve attack``. Their grids are experiments: ``inversion.toml`` and ``linear.toml`` in ``experiments``.
"""
