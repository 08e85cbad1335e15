"""examples/offload_lanes.py: a picture of one forward out of a trace."""

import json
import subprocess
import sys
import xml.etree.ElementTree as xml

from repo.tree import ROOT

SCRIPT = ROOT / "examples" / "offload_lanes.py"


def trace(path):
    """Two forwards of two layers."""
    events = [
        {"ph": "M", "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(("call", "cpu", "link", "device", "merge"))
    ]
    for number, layer in enumerate((0, 1, 0, 1)):
        for tid in (0, 1, 2):
            args = {"layer": layer, "expert": 3}
            events.append(
                {"name": f"e{tid}", "ph": "X", "tid": tid, "args": args, "ts": 100.0 * number, "dur": 50 - tid}
            )
    path.write_text(json.dumps({"traceEvents": events}))


def run(*words):
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True)


def test_one_forward_is_drawn_and_its_lanes_are_summed(tmp_path):
    trace(tmp_path / "t.json")
    done = run(tmp_path / "t.json", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "2 experts calls, 100 us",
        "cpu       2 spans,       98 us",
        "link      2 spans,       96 us",
    ]
    boxes = xml.parse(tmp_path / "p.svg").getroot().findall("{*}rect")
    assert len(boxes) == 1 + 2 * 3
    done = run(tmp_path / "t.json", tmp_path / "p.svg", "--forward", 2)
    assert done.returncode == 1 and "the trace has 2 forwards, 0 to 1" in done.stderr
