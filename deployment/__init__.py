"""Running Fedsieve between organisations: keys, the processes of a deployment, and what an operator asks of Flower.

May import ``client``, ``server`` and ``common``; only the command and tests import it. Start reading at ``cli.py``.
"""
