"""What counts as a candidate's work with files, and what a compiler writes for it."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
from goldsmith.assay.gate.isolation.events import EventLog
from goldsmith.assay.support.known_functions import KnownFunctions

os.chdir(sys.argv[1])
log = EventLog(KnownFunctions())
writes = "import os\\ndef write(path):\\n"
writes += "    os.close(os.open(path, os.O_RDWR | os.O_CREAT if path != '.' else os.O_RDWR | os.O_TMPFILE))\\n"
library, own = {}, {}
exec(compile(writes, sys.argv[2].format(own=os.getcwd()), "exec"), library)
calls = "def candidate(write, path):\\n    write(path)\\n"
exec(compile(calls, os.path.join(os.getcwd(), "candidate.py"), "exec"), own)
with log.listening():
    own["candidate"](library["write"], sys.argv[3])
print(json.dumps(log.report()))
"""


@pytest.mark.parametrize(
    ("writer", "path", "noted"),
    [
        ("/x/site-packages/triton/runtime/cache.py", "cache/kernel.json", False),
        ("/x/site-packages/torch/_inductor/codecache.py", "kernel.cpp", False),
        ("/x/site-packages/triton/backends/nvidia/compiler.py", ".", False),  # an unnamed file in the folder
        ("/x/site-packages/numpy/lib/npyio.py", ".", True),
        ("/x/site-packages/triton/runtime/cache.py", "../elsewhere.json", True),
        ("/x/site-packages/numpy/lib/npyio.py", "results.npy", True),
        ("{own}/candidate.py", "results.bin", True),
        ("{own}/triton/candidate.py", "results.bin", True),
    ],
)
def test_a_compiler_may_write_files_of_its_own(tmp_path, writer, path, noted):
    folder = tmp_path / "own"
    (folder / "cache").mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), writer, path], capture_output=True, text=True, check=True
    )
    events = [kind for kind, *_ in json.loads(ran.stdout)]
    assert events == (["file"] if noted else [])
