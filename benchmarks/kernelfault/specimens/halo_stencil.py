"""u <- u + dt kappa lap(u), some steps of diffusion on a grid whose rows are shared by ranks, and its adjoint.

Zero above and below the grid, columns are a ring. Each rank keeps its rows between two halo rows that its neighbours
fill before every step. The backward goes through the steps from the last one; what a rank finds for its halo rows goes
back to the neighbour that they came from. Ranks have unequal shares.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(H=[8], W=[5], ranks=[3])
def plate(make, H, W, ranks):
    return {"u": make.normal(H, W), "kappa": 0.5 + make.uniform(H, W), "dt": 0.1, "steps": 3, "ranks": ranks}


@assay.case(H=[7], W=[4], ranks=[2])
def two(make, H, W, ranks):
    return {**plate[0].draw(make, H, W, ranks), "steps": 2, "dt": 0.15}


@assay.case(H=[11], W=[3], ranks=[4])
def narrow(make, H, W, ranks):
    return {**plate[0].draw(make, H, W, ranks), "steps": 4, "dt": 0.12}


def golden(u, kappa, dt, steps, ranks):
    for step in range(steps):
        edge = torch.zeros_like(u[:1])
        rows = torch.cat([edge, u[:-1]]) + torch.cat([u[1:], edge])
        lap = rows + u.roll(1, 1) + u.roll(-1, 1) - 4 * u
        u = assay.stage(f"u{step + 1}", u + dt * kappa * lap)
    return u


def shares(H, ranks):
    """First and last row of each rank; the first ones have the rows that are left over."""
    size, left = divmod(H, ranks)
    edges = [0]
    for rank in range(ranks):
        edges.append(edges[-1] + size + (rank < left))
    return list(zip(edges, edges[1:], strict=False))


def exchange(held):
    """Fills the halo rows of every rank from its neighbours' first and last rows."""
    for rank, mine in enumerate(held):
        mine[0] = held[rank - 1][-2] if rank > 0 else 0.0
        mine[-1] = held[rank + 1][1] if rank + 1 < len(held) else 0.0


def laplacian(mine):
    inner = mine[1:-1]
    return mine[:-2] + mine[2:] + inner.roll(1, 1) + inner.roll(-1, 1) - 4 * inner


class Diffusion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, kappa, dt, steps, ranks):
        H, W = u.shape
        parts, held, laps = shares(H, ranks), [], []
        for first, last in parts:
            mine = torch.zeros(last - first + 2, W)
            mine[1:-1] = u[first:last]
            held.append(mine)
        for step in range(steps):
            exchange(held)
            local = [laplacian(mine) for mine in held]
            for mine, lap, (first, last) in zip(held, local, parts, strict=True):
                mine[1:-1] += dt * kappa[first:last] * lap
            laps.append(torch.cat(local))
            now = assay.stage(f"u{step + 1}", torch.cat([mine[1:-1] for mine in held]))
            for mine, (first, last) in zip(held, parts, strict=True):
                mine[1:-1] = now[first:last]
        y = torch.empty(H, W)
        for mine, (first, last) in zip(held, parts, strict=True):
            y[first:last] = mine[1:-1]
        ctx.save_for_backward(kappa, *laps)
        ctx.config = dt, ranks
        return y

    @staticmethod
    def backward(ctx, g):
        kappa, *laps = ctx.saved_tensors
        dt, ranks = ctx.config
        parts = shares(len(g), ranks)
        grads = [g[first:last].clone() for first, last in parts]
        d_kappa = torch.zeros(kappa.shape)
        for lap in reversed(laps):
            before, above, below = [], [], []
            for mine, (first, last) in zip(grads, parts, strict=True):
                d_kappa[first:last] += dt * mine * lap[first:last]
                d_lap = dt * kappa[first:last] * mine
                grown = torch.zeros(len(mine) + 2, mine.shape[1])
                grown[1:-1] = mine - 4 * d_lap + d_lap.roll(1, 1) + d_lap.roll(-1, 1)
                grown[:-2] += d_lap
                grown[2:] += d_lap
                before.append(grown[1:-1])
                above.append(grown[0])
                below.append(grown[-1])
            for rank in range(ranks - 1):
                before[rank][-1] += above[rank + 1]
                before[rank + 1][0] += below[rank]
            grads = before
        return torch.cat(grads), d_kappa, None, None, None


def kernel(u, kappa, dt, steps, ranks):
    return Diffusion.apply(u, kappa, dt, steps, ranks)


def target():
    return assay.Target(kernel, golden, cases=[plate, two, narrow], name="halo_stencil", outputs=("y",))
