"""The server's side of the methods: which mask a round uses and what becomes of its releases. No torch.

``policy.MethodPolicy`` is what every method has here; a module of this folder holds one ``Policy``, and a method names
its module (``common.methods.Method.server``). Everything is made from public or already released quantities alone.
"""

from importlib import import_module

from common.config import RunConfig
from server.methods.policy import MethodPolicy


def open_policy(config: RunConfig, size: int) -> MethodPolicy:
    """Return the server's side of the run's method, for a model of ``size`` parameters."""
    policy: MethodPolicy = import_module(f"server.methods.{config.how.server}").Policy(config, size)
    return policy
