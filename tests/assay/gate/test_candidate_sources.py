"""Candidates from files, folders and JSON lines, and the sources of completions."""

import json

import pytest

from goldsmith.assay import gate
from goldsmith.assay.gate import candidate_call
from goldsmith.assay.gate.formats import completions
from goldsmith.assay.gate.formats.candidate_source import NoCandidates, load_candidates
from goldsmith.assay.gate.isolation.loading import Refusal

from .problems import RIGHT, TRITON, problem


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b.py", "a.cu", "deep/c.py", "_private.py", ".hidden/d.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("PROBLEM = 'softmax'\n" if name == "b.py" else "x = 1\n")
    found = load_candidates([tmp_path])
    assert [s.candidate.name for s in found] == ["a.cu", "b", "deep/c"]
    assert [s.candidate.language for s in found] == ["cuda", "python", "python"]
    assert [s.problem for s in found] == [None, "softmax", None]


BAD = [("language", "fortran"), ("language", ["a"]), ("entry", 5), ("problem", {}), ("files", [1]), ("source", 7)]


def test_names_are_texts_and_each_is_there_once(tmp_path):
    path = tmp_path / "made.jsonl"
    names = [1, "1", 1.0, None, [], True, "", "1", "made.jsonl:4"]
    path.write_text("\n".join(json.dumps({"source": RIGHT, "id": name}) for name in names))
    found = [s.candidate.name for s in load_candidates(path)]
    assert found == [s.candidate.name for s in load_candidates([str(path)])]
    assert found[:3] == ["1", "1#2", "1.0"] and found[3:7] == [f"made.jsonl:{n}" for n in (4, 5, 6, 7)]
    assert found[7:] == ["1#3", "made.jsonl:4#2"] and all(isinstance(name, str) for name in found)


def test_json_lines_are_candidates_and_bad_lines_are_refused_ones(tmp_path):
    lines = [
        json.dumps({"source": RIGHT, "id": "first", "problem": "softmax"}),
        "",
        "{not json",
        json.dumps({"text": "?"}),
        json.dumps({"completion": f"Here:\n```python\n{RIGHT}\n```\nDone."}),
        json.dumps({"source": "int f();", "language": "CUDA", "entry": "f"}),
        json.dumps({"source": RIGHT, "id": "first"}),
        json.dumps([1, 2]),
        *(json.dumps({"source": "x", "id": 7, **{field: value}}) for field, value in BAD),
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines))
    found = load_candidates([path])
    names = ["first", "made.jsonl:3", "made.jsonl:4", "made.jsonl:5", "made.jsonl:6", "first#2", "made.jsonl:8", "7"]
    names += [f"7#{n}" for n in range(2, len(BAD) + 1)]
    assert [s.candidate.name for s in found] == names
    assert [s.verdict.reason if s.verdict else "" for s in found] == [
        "",
        "not_json",
        "no_source",
        "",
        "",
        "",
        "no_source",
        "unknown_language",
        "bad_field",
        "bad_field",
        "bad_field",
        "no_source",
        "no_source",
    ]
    assert "def candidate" in found[3].candidate.source and "```" not in found[3].candidate.source
    assert (found[4].candidate.language, found[4].candidate.entry) == ("cuda", "f")


def test_a_file_that_cannot_be_read_is_a_refused_candidate(tmp_path):
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "big.py").write_text("#" * (17 << 20))
    (tmp_path / "marked.py").write_text("x = 1", encoding="utf-8-sig")
    found = load_candidates([tmp_path])
    assert [s.verdict.reason for s in found[:2]] == ["too_large", "unreadable"]
    assert found[2].candidate.source == gate.Candidate("marked", "\ufeffx = 1").source == "x = 1"


LATIN = "# -*- coding: latin-1 -*-\n" + RIGHT.replace("e / e", "e * len('\u00e9') / e")


def test_a_python_file_is_read_in_the_encoding_that_it_declares(tmp_path):
    (tmp_path / "a.py").write_bytes(LATIN.encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"# coding: nonsense\n")
    (tmp_path / "c.py").write_bytes(b"# coding: hex\n")
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "d", "source": LATIN}))
    found = load_candidates([tmp_path])
    assert [s.verdict.reason if s.verdict else "" for s in found] == ["", "unreadable", "unreadable", ""]
    assert found[0].candidate.source == found[3].candidate.source == LATIN
    assert gate.Candidate.read(tmp_path / "a.py").source == LATIN
    verdict = gate.judge(found[0].candidate, problem(), seed=1, probes="values")
    assert verdict.status == "accepted", verdict


def test_a_name_is_only_a_label():
    source = RIGHT.replace("import torch", "import torch, xml.dom")
    for name in ("xml", "k" * 5000, "../a", ""):
        verdict = gate.judge(gate.Candidate(name, source), problem(), seed=1, probes="values")
        assert verdict.status == "accepted", verdict


def test_paths_without_candidates_are_named(tmp_path):
    with pytest.raises(NoCandidates, match="nowhere: there is no such file"):
        load_candidates([tmp_path / "nowhere"])
    with pytest.raises(NoCandidates, match="holds no candidates"):
        load_candidates([tmp_path])


@pytest.mark.parametrize(
    "completion, wanted",
    [
        ("x = 1", ("x = 1", "python")),
        ("```python\nx = 1\n```\nand\n```py\nx = 2\n```", ("x = 2\n", "python")),
        ("text\n````cuda\n// ```\n__global__\n````", ("// ```\n__global__\n", "cuda")),
        ("cut off\n```python\nx = 3", ("x = 3", "python")),
        ("```python\nx = 5\n```\nRun it:\n```bash\npython x.py\n```", ("x = 5\n", "python")),
        ("```text\nx = 6\n```", ("x = 6\n", "python")),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "```c++\nf\n```"}], ("f\n", "cpp")),
        ({"content": [{"type": "text", "text": "y"}, {"type": "text", "text": " = 4"}]}, ("y = 4", "python")),
        (None, ("", "python")),
        ([], ("", "python")),
        ("1. Do:\n   ```python\n   def f(x):\n       return x\n   ```\n", ("def f(x):\n    return x\n", "python")),
        ("- ```cpp\n  int f() {\n  }\n  ```", ("int f() {\n}\n", "cpp")),
        ("\t```\n\tif x:\n\t\ty = 1\n  z\n\t```", ("if x:\n\ty = 1\n z\n", "python")),
        ("So:\n> ```python\n> def f(x):\n>     return x\n>\n> ```\nEnd.", ("def f(x):\n    return x\n\n", "python")),
        ("> 1. Do:\n>    ```\n>    x = 1\nIt ends.", ("x = 1\n", "python")),
        ('  ```python\n  x = "\n    ```not a fence\n  "\n  ```', ('x = "\n  ```not a fence\n"\n', "python")),
        ("- ```python\n  def f(x):\n      return", ("def f(x):\n    return", "python")),
    ],
)
def test_the_source_of_a_completion_is_its_last_block_of_code(completion, wanted):
    assert completions.source(completion) == wanted


@pytest.mark.parametrize(
    "source, language, reason",
    [
        ("def candidate(", "python", "does_not_parse"),
        ("x = '\0'", "python", "does_not_parse"),
        ("x = '\ud800'", "python", "does_not_parse"),
        ("x = " + "(" * 400 + ")" * 400, "python", "does_not_parse"),
        ("import not_there", "python", "missing_package"),
        ("def other(x): return x", "python", "no_entry"),
        ("candidate = 3", "python", "no_entry"),
    ],
)
def test_a_source_that_is_no_candidate_is_refused_for_a_reason(source, language, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as why:
        candidate_call.load(source, language=language)
    assert why.value.reason == reason


@pytest.mark.gpu
def test_a_wrong_triton_kernel_is_not_cheating_because_its_compiler_writes_files():
    right, wrong = TRITON, TRITON.replace("tl.sum(e)", "(tl.sum(e) + 0.01)")
    for source, status in ((right, "accepted"), (wrong, "wrong")):
        verdict = gate.judge(gate.Candidate("softmax", source), problem(backward=None), device="cuda")
        assert verdict.status == status, verdict
