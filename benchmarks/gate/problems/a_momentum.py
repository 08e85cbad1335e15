"""A step of SGD with Nesterov's momentum: the new parameters and the new velocity."""

from goldsmith import assay


@assay.case(N=[70, 3])
def parameters(make, N):
    return {"p": make.normal(N), "g": make.normal(N), "velocity": make.normal(N), "lr": 0.05, "mu": 0.9}


cases = parameters
outputs = ("p_new", "velocity_new")
backward = None


def golden(p, g, velocity, lr, mu):
    velocity_new = mu * velocity + g
    return p - lr * (g + mu * velocity_new), velocity_new
