"""The server side: never sees data.

``strategy`` is the Flower Strategy, ``app`` wires it up; ``messages`` asks sites, ``open_round`` keeps what they
answered, ``state`` is what survives a restart, ``methods`` chooses masks and combines releases; the rest are small
parts that know nothing of each other. Imports ``common`` and never ``client`` or ``simulations``. Start at
``strategy``.
"""
