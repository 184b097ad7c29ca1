"""Tests of clearhead.

Worker processes of pytest-xdist share the cores, so a thread that waits must not spin on a core that another process
needs. OpenMP and OpenBLAS read these variables when they are loaded; worker processes inherit them.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
