"""One torch thread: models are tiny, and on a busy machine two threads wait for each other far longer."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
