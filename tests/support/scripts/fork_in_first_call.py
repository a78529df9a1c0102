"""A fork() while another thread makes the first call.

That call imports Numba and loads the kernels; the child's calls have to end too.
"""

from __future__ import annotations

import os
import threading
import time

from cases import make_case, run, same_bits

CASE = make_case([30, 10], [60, 40], head_num=2, head_size=64)
outs = []
other = threading.Thread(target=lambda: outs.append(run(CASE, "cpu")))
other.start()
children = []
while other.is_alive() and len(children) < 8:
    time.sleep(0.1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            out = run(CASE, "cpu", num_threads=2)
            same_bits(run(CASE, "cpu", num_threads=1), out)
            status = 0
        finally:
            os._exit(status)
    children.append(pid)
other.join()
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

from hosts import bring_up  # noqa: E402

bring_up()
same_bits(run(CASE, "cpu"), outs[0])
print("right")
