"""What holds for every test."""

import os

from hypothesis import settings

# One thread a process, here and in the processes that tests start: on tensors as small as these a second thread costs
# more than it computes, and where other work runs every operation waits for it. Said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Two test processes at a time ('make test') must not meet each other's Ray, which looks for a cluster that is up in its
# temporary folder.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["RAY_TMPDIR"] = f"/tmp/ray-{worker}-{os.getuid()}"

# Correctness does not depend on how long a busy machine takes for an example.
settings.register_profile("fedsieve", deadline=None)
settings.load_profile("fedsieve")
