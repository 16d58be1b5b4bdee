"""The clipping engine: sums of masked and clipped per-record gradients, at nearly the price of plain ones.

``book_keeping`` runs one forward and one backward pass and asks each layer's rule for two things: the squared norm of
every record's masked gradient, and the sum of those gradients under given factors. A rule is one small file here;
``rules`` says which layer has which. docs/engine.md derives them. Imports ``common`` and torch. Start at
``book_keeping``.
"""
