"""An OpenMP library that was loaded with local symbols becomes global, and no second one is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.ops import openmp
from tests.processes import reported

MAPS = Path("/proc/self/maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="this system does not list what is loaded")

#: Without torch, whose wheels for x86 show their OpenMP to all.
ALONE = """if True:
    import ctypes, importlib.util, json, sys
    from pathlib import Path
    found = importlib.util.spec_from_file_location("openmp", sys.argv[1])
    openmp = importlib.util.module_from_spec(found)
    found.loader.exec_module(openmp)
    def seen():
        return hasattr(ctypes.CDLL(None), "omp_get_thread_num")
    def loaded():
        return any("omp" in line for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line)
    steps = [seen()]
    openmp.share()
    steps += [seen(), loaded()]
    ctypes.CDLL(sys.argv[2])
    steps.append(seen())
    openmp.share()
    steps.append(seen())
    print(json.dumps(steps))
"""


def the_one_of_torch() -> str:
    """The file of the OpenMP in use here."""
    paths = (line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/" in line)
    libraries = [path for path in paths if re.search(r"/lib(gomp|omp|iomp5)[^/]*$", path)]
    if not libraries:
        pytest.skip("this torch has no OpenMP of its own")
    return libraries[0]


@needs_maps
def test_openmp_symbols_become_global() -> None:
    module = str(Path(openmp.__file__))
    run = [sys.executable, "-I", "-c", ALONE, module, the_one_of_torch()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, without_any, loaded, for_one, for_all = json.loads(done.stdout)
    assert not before
    assert (without_any, loaded) == (False, False)
    assert (for_one, for_all) == (False, True)


def test_the_kernels_share_torch_s_threads() -> None:
    """One pool: the number of threads that torch sets is the one that the kernels' OpenMP knows."""
    code = """if True:
        import ctypes, torch
        from clearhead.ops import openmp
        openmp.share()
        torch.set_num_threads(3)
        print(ctypes.CDLL(None).omp_get_max_threads())
    """
    done = reported(code)
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("libgomp.so.1", True),
        ("libgomp-24e2ab19.so.1.0.0", True),
        ("libomp.so.5", True),
        ("libiomp5.so", True),
        ("libnvpl_blas_lp64_gomp.so.0", False),
        ("libompl.so", False),
        ("libgomp.txt", False),
    ],
)
def test_names_of_openmp_libraries(name: str, is_one: bool) -> None:
    assert bool(openmp.FILE.match(name)) is is_one
