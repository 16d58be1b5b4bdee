"""The methods: what each is called, uploads and costs. One file each, one line each in ``METHODS``.

Start at ``method.Method``. A method's part at the site is a module of ``client.mechanisms``, its part at the server one
of ``server.methods``; both may be shared.
"""

from common.errors import ConfigError
from common.methods import (
    clip_only,
    compressive,
    dense,
    importance,
    match_noise,
    noisy_only,
    posterior,
    random,
    random_step,
    ranked,
    select_exponential,
    select_random,
    select_sparse_vector,
)
from common.methods.method import Method as Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        dense.METHOD,
        random.METHOD,
        random_step.METHOD,
        posterior.METHOD,
        match_noise.METHOD,
        ranked.METHOD,
        importance.METHOD,
        select_exponential.METHOD,
        select_sparse_vector.METHOD,
        select_random.METHOD,
        compressive.METHOD,
        noisy_only.METHOD,
        clip_only.METHOD,
    )
}


def method_of(name: str) -> Method:
    """Return the method of that name."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: expected one of {', '.join(METHODS)} (see 'fedsieve methods')")
    return METHODS[name]
