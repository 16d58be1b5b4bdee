"""What holds for every test."""

import os

# One thread a process, here and in the processes that tests start: on tensors as small as these a second thread costs
# more than it computes, and where other work runs every operation waits for it. Said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
