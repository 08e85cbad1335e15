"""A result with the name of an input, a gradient or an output gradient is refused before anything is judged."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.returned_values import names_of

X = {"x": torch.ones(2, 3), "y": torch.full((2, 3), 2.0)}


def times(x, y):
    return x * y


def both(x, y):
    return x * y, x + y


def named(result):
    return lambda x, y: {result: x * y}


def gradients(x, y, grad_y):
    return {"x": grad_y * y, "y": grad_y * x}


def make(kernel, cases=None, **more):
    return assay.Target(kernel, kernel, cases=cases or X, **more)


IN_USE = "is also the name of a case value; case values: "
WRONG = [
    (make(named("x")), f"'x' {IN_USE}x, y; "),
    (make(named("x.grad")), "'x.grad' is also the name of the gradient of x; "),
    (
        make(named("grad_y"), {**X, "grad_grad_y": X["x"]}),
        "'grad_grad_y' is also the name of the output gradient of 'grad_y'",
    ),
]


@pytest.mark.parametrize("target, text", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("verb", [assay.check, assay.diagnose])
def test_a_result_with_a_name_in_use_is_a_mistake_in_the_declaration(verb, target, text):
    with pytest.raises(assay.TargetError) as error:
        verb(target)
    assert str(error.value).startswith("outputs: the candidate's result '") and text in str(error.value)


@pytest.mark.parametrize(
    "outputs, text", [(("x.grad",), "'x.grad' is also the name of the gradient of x"), (("h.grad",), "of h;"),
                      (("z", "grad_z"), "'grad_z' is also the name of the output gradient of 'z'")]
)  # fmt: skip
def test_a_declared_name_is_refused_when_the_target_is_made(outputs, text):
    with pytest.raises(assay.TargetError, match="^outputs: ") as error:
        make(times, outputs=outputs)
    assert text in str(error.value)


def sent_z(x, y, grad_z):
    return {"x": grad_z * y, "y": grad_z * x}


RIGHT = [
    make(times, outputs=("z",)),
    make(times),
    make(times, backward=sent_z),
    make(lambda x, y0: both(x, y0), {"x": X["x"], "y0": X["y"]}),
    make(lambda x, grad_y: x * grad_y, {"x": X["x"], "grad_y": X["y"]}),
    make(named("z")),
    make(lambda x, grad_y: x * grad_y, {"x": X["x"], "grad_y": X["y"]}, backward=None),
    make(lambda x, grad_y: x * grad_y, {"x": X["x"], "grad_y": X["y"]}, outputs=("dx",)),
    make(both, outputs=("z", "grad_z"), backward=None),
]


@pytest.mark.parametrize("target", RIGHT, ids=range(len(RIGHT)))
def test_unused_names_are_accepted(target):
    assert assay.check(target).ok


TAKEN = [({}, "z"), ({"z": 1}, "out"), ({"z": 1, "grad_out": 1, "result": 1}, "my_result0")]


@pytest.mark.parametrize("more, name", TAKEN, ids=[name for _, name in TAKEN])
def test_the_default_name_is_unused(more, name):
    backward = eval(f"lambda x, y, grad_{name}: {{'x': grad_{name} * y, 'y': grad_{name} * x}}")
    report = assay.check(make(times, {**X, **more}, backward=backward))
    assert {row.tensor for row in report.rows} == {name, "x.grad", "y.grad"}


def test_with_autograd_the_default_name_is_y_even_with_an_input_y():
    assert {row.tensor for row in assay.check(make(times)).rows} == {"y", "x.grad", "y.grad"}
    gradient = make(lambda x, grad_y: x * grad_y, {"x": X["x"], "grad_y": X["y"]})
    assert "z" in {row.tensor for row in assay.check(gradient).rows}


def test_a_backward_with_an_unknown_parameter_gets_the_list_of_names():
    with pytest.raises(assay.TargetError, match="takes 'grad_y', which is not supplied; there are: .*grad_z"):
        assay.check(make(times, backward=gradients))


def test_a_result_is_what_its_container_holds_and_not_what_that_shows():
    class Shows(dict):
        def items(self):
            return [("y", torch.zeros(2))]

    class Iterates(tuple):
        def __iter__(self):
            return iter([torch.zeros(2)])

    x = torch.ones(3)
    assert names_of(Shows(z=x), None, "candidate") == [("z", x)]
    assert names_of(Iterates([x, x]), None, "candidate") == [("y0", x), ("y1", x)]
