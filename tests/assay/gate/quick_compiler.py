"""Stands for torch's compiler of extensions, which takes a minute: a source is C for Python's own interface."""

import subprocess
import sysconfig
from pathlib import Path

from goldsmith.assay.gate.compiled.sources import exported_name, module_name
from goldsmith.assay.gate.isolation.loading import Refusal

# `#define MODULE` and `#define EXPORTED` come before; the function is that of problems.py
SOURCE = """
#include <Python.h>
// int candidate() { finds its name }
static PyObject *candidate_(PyObject *self, PyObject *args) {
    PyObject *x, *w;
    if (!PyArg_ParseTuple(args, "OO", &x, &w)) return NULL;
    PyObject *y = PyObject_CallMethod(x, "softmax", "i", -1);
    return y == NULL ? NULL : PyNumber_Multiply(y, w);
}
static PyMethodDef functions[] = {{EXPORTED, candidate_, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", NULL, -1, functions};
PyMODINIT_FUNC MODULE(void) { return PyModule_Create(&module); }
#if 0
torch::Tensor candidate(torch::Tensor x, torch::Tensor w) {}
#endif
"""


def build(source, files, names, language):
    name, module = exported_name(source, names), module_name(source)
    Path("candidate.c").write_text(source)
    for path, text in files.items():
        Path(path).write_text(text)
    command = ["cc", "-shared", "-fPIC", "-I", sysconfig.get_paths()["include"], "-I."]
    command += [f"-DMODULE=PyInit_{module}", f'-DEXPORTED="{name}"', "candidate.c", "-o", "library.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refusal("does_not_compile", done.stderr[:500])
    return Path("library.so").read_bytes()
