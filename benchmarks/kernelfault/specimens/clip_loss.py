"""(mean of rows' + mean of columns' cross entropy) / 2 of c a b^T with the pairs on the diagonal, c = exp(log_scale).

a and b are the rows of two encoders, made unit vectors. Logits are formed block by block, never all at once: forward
for the logsumexps of rows and columns, and again for the gradients.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(N=[10], D=[5])
def pairs(make, N, D):
    return {"image": make.normal(N, D), "text": make.normal(N, D), "log_scale": make.uniform(1) + 0.5, "eps": 1e-6}


@assay.case(N=[6], D=[8])
def few(make, N, D):
    return pairs[0].draw(make, N, D)


def golden(image, text, log_scale, eps):
    a = assay.stage("a", image / torch.sqrt(image.square().sum(1, keepdim=True) + eps))
    b = assay.stage("b", text / torch.sqrt(text.square().sum(1, keepdim=True) + eps))
    logits = torch.exp(log_scale) * (a @ b.mT)
    rows = assay.stage("rows", torch.logsumexp(logits, 1))
    columns = assay.stage("columns", torch.logsumexp(logits, 0))
    return ((rows - logits.diagonal()).mean() + (columns - logits.diagonal()).mean()) / 2


def unit(x, eps):
    inverse = torch.rsqrt((x * x).sum(1, keepdim=True) + eps)
    return x * inverse, inverse


def unit_backward(grad, hat, inverse):
    return inverse * (grad - hat * (grad * hat).sum(1, keepdim=True))


def joined(top, total, logits, dim):
    """The running maximum and sum with a block's logits taken in."""
    higher = torch.maximum(top, logits.amax(dim))
    return higher, total * torch.exp(top - higher) + torch.exp(logits - higher.unsqueeze(dim)).sum(dim)


class ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image, text, log_scale, eps):
        N = len(image)
        a, a_inverse = unit(image, eps)
        b, b_inverse = unit(text, eps)
        a, b = assay.stage("a", a), assay.stage("b", b)
        c = torch.exp(log_scale)
        top, total = torch.full((2, N), -torch.inf), torch.zeros(2, N)
        paired = torch.empty(N)
        for i in range(0, N, BLOCK):
            for j in range(0, N, BLOCK):
                at, to = slice(i, min(i + BLOCK, N)), slice(j, min(j + BLOCK, N))
                logits = c * (a[at] @ b[to].mT)
                top[0, at], total[0, at] = joined(top[0, at], total[0, at], logits, 1)
                top[1, to], total[1, to] = joined(top[1, to], total[1, to], logits, 0)
                if i == j:
                    paired[at] = logits.diagonal()
        lse = top + torch.log(total)
        rows, columns = assay.stage("rows", lse[0]), assay.stage("columns", lse[1])
        ctx.save_for_backward(a, a_inverse, b, b_inverse, c, rows, columns)
        return ((rows - paired).sum() + (columns - paired).sum()) / (2 * N)

    @staticmethod
    def backward(ctx, g):
        a, a_inverse, b, b_inverse, c, rows, columns = ctx.saved_tensors
        N = len(a)
        da, db, dc = torch.zeros(a.shape), torch.zeros(b.shape), torch.zeros(1)
        for i in range(0, N, BLOCK):
            for j in range(0, N, BLOCK):
                at, to = slice(i, min(i + BLOCK, N)), slice(j, min(j + BLOCK, N))
                cosines = a[at] @ b[to].mT
                logits = c * cosines
                d = torch.exp(logits - rows[at].unsqueeze(1)) + torch.exp(logits - columns[to])
                if i == j:
                    d.diagonal().sub_(2)
                d = d * (g / (2 * N))
                da[at] += c * (d @ b[to])
                db[to] += c * (d.mT @ a[at])
                dc += (d * cosines).sum()
        return unit_backward(da, a, a_inverse), unit_backward(db, b, b_inverse), dc * c, None


def kernel(image, text, log_scale, eps):
    return ClipLoss.apply(image, text, log_scale, eps)


def target():
    return assay.Target(kernel, golden, cases=[pairs, few], name="clip_loss", outputs=("loss",))
