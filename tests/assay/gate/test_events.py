"""What counts as a candidate's work with files, what a compiler writes for it, and how functions are looked at."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, sys
from goldsmith.assay.gate.isolation.events import EventLog
from goldsmith.assay.judge.known_functions import KnownFunctions
from goldsmith.assay.judge.known_modules import KnownModules

writes = "import os\\ndef write(path):\\n"
writes += "    os.close(os.open(path, os.O_RDWR | os.O_CREAT if path != '.' else os.O_RDWR | os.O_TMPFILE))\\n"
calls = "def candidate(write, path):\\n    write(path)\\n"
known = KnownFunctions(), KnownModules()
for folder, writer, path in json.loads(sys.argv[1]):
    os.chdir(folder)
    log = EventLog(*known)
    library, own = {}, {}
    exec(compile(writes, writer.format(own=os.getcwd()), "exec"), library)
    exec(compile(calls, os.path.join(os.getcwd(), "candidate.py"), "exec"), own)
    with log.listening():
        own["candidate"](library["write"], path)
    print(json.dumps(log.report()))
asked = []
sys.addaudithook(lambda event, arguments: asked.append(event))
print(len(known[0].replaced()), len(asked))
"""
WRITERS = [
    ("/x/site-packages/triton/runtime/cache.py", "cache/kernel.json", False),
    ("/x/site-packages/torch/_inductor/codecache.py", "kernel.cpp", False),
    ("/x/site-packages/triton/backends/nvidia/compiler.py", ".", False),  # an unnamed file in the folder
    ("/x/site-packages/numpy/lib/npyio.py", ".", True),
    ("/x/site-packages/triton/runtime/cache.py", "../elsewhere.json", True),
    ("/x/site-packages/numpy/lib/npyio.py", "results.npy", True),
    ("{own}/candidate.py", "results.bin", True),
    ("{own}/triton/candidate.py", "results.bin", True),
    ("/x/importlib/metadata.py", "../../packages/some-1.0.dist-info/entry_points.txt", False),
    ("/x/importlib/metadata.py", "../../elsewhere/some-1.0.dist-info/entry_points.txt", True),
]


def test_a_compiler_may_write_files_of_its_own(tmp_path):
    """In one process of its own, because Python has no way to take back an audit hook."""
    asked = []
    for name in ("packages", "elsewhere"):
        (tmp_path / name / "some-1.0.dist-info").mkdir(parents=True)
    for number, (writer, path, _) in enumerate(WRITERS):
        folder = tmp_path / str(number) / "own"
        (folder / "cache").mkdir(parents=True)
        asked.append((str(folder), writer, path))
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *reports, compared = ran.stdout.splitlines()
    found = [[kind for kind, *_ in json.loads(line)] for line in reports]
    assert found == [["file"] if noted else [] for *_, noted in WRITERS]
    # a function that is asked for its code calls the hook: 8,000 times a look, and a candidate gets ten looks
    replaced, events = map(int, compared.split())
    assert replaced == 0 and events < 100
