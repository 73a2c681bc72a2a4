"""Lines that people write of parameters and gradients, beside a model. Each gives what it gives on one device.

``p`` is a parameter with a gradient, ``ps`` all of them.
"""

import pickle  # noqa: F401

import torch

# Beside plain tensors, which stand for whole ones.
PLAIN_READS = """
p * plain(p)
plain(p) - p
torch.where(plain(p) > 0, p, 0)
torch.where(p > 0, plain(p), p)
torch.nn.functional.linear(plain(p), p)
p @ plain(p)[0]
p[torch.tensor([0, 0])]
p[plain(p) > 0].sum()
p.index_select(0, torch.tensor([0, 0]))
p.gather(0, torch.tensor([[0, 0]]))
nn.functional.embedding(torch.tensor([0, 0]), p)
torch.equal(p, plain(p))
torch.equal(plain(p), p)
torch.allclose(p, torch.tensor(p.tolist(), dtype=p.dtype))
torch.cat([p, plain(p)])
torch.stack([plain(p), p])
torch.addmm(plain(p) @ plain(p).T, p, plain(p).T)
torch.dot(p.flatten(), plain(p).flatten()).item()
torch.lerp(plain(p), p, 0.3)
(p == plain(p)).any().item()
plain(p)[:1].expand_as(p) * p
plain(p).flatten().view_as(p) * p
plain(p).to(p) + p
torch.dist(p, plain(p)).item()
torch.nn.functional.mse_loss(p, plain(p))
torch.autograd.grad(torch.nn.functional.mse_loss(p, plain(p)), p)[0]
torch.nn.functional.cosine_similarity(p, plain(p), dim=0)
torch.nn.functional.conv2d(plain(p)[None, None], p[None, None])
torch.autograd.grad(torch.nn.functional.conv2d(plain(p)[None, None], p[None, None]).sum(), p)[0]
torch.searchsorted(torch.arange(4.0).to(p), p.detach())
x = plain(p).requires_grad_(); (x * p).sin().sum().backward(); x.grad
torch.autograd.grad(torch.nn.functional.linear(plain(p).requires_grad_(), p).sum(), p)[0]
np.asarray(p.detach()) + np.ones(p.shape)
""".strip().splitlines()

PLAIN_WRITES = """
p.add_(plain(p))
p.mul_(plain(p) > 0)
p.data.add_(plain(p), alpha=0.1)
p.masked_fill_(plain(p) > 0, 3)
p[plain(p) > 0] = 0
p[torch.tensor([0, 0])] = 3
p.addcmul_(plain(p), p, value=2)
p.index_add_(0, torch.tensor([0]), plain(p)[:1])
p.scatter_(0, torch.tensor([[0, 0]]), 3.0)
p.sub_(torch.arange(p.shape[-1]).to(p))
p.clamp_(plain(p) * 0, plain(p).abs())
p.grad.add_(plain(p))
p.grad = plain(p)
p[0].add_(plain(p)[0])
e = plain(p); e.lerp_(p, 0.1); p.copy_(e)
e = plain(p); e += p; p.add_(e)
e = plain(p); torch.add(p, 1, out=e); p.copy_(e)
e = plain(p); e[0] = p[0]; p.copy_(e)
t = torch.zeros((), dtype=p.dtype); t += p.grad.norm() ** 2; p.mul_(t)
t = torch.zeros(1, dtype=p.dtype); t.add_(p.sum()); p.mul_(t)
torch._foreach_add_(ps, [plain(q) for q in ps])
es = [plain(q) for q in ps]; torch._foreach_lerp_(es, ps, 0.1); torch._foreach_copy_(ps, es)
es = [plain(q) for q in ps]; torch._foreach_mul_(ps, 2); torch._foreach_add_(ps, es, alpha=0.5)
""".strip().splitlines()

READS = """
p.grad.norm().item()
float(p.abs().max())
p.mean().item()
bool(p.isnan().any())
p.sum().tolist()
int(p.sum() * 10)
float(p.norm(1))
float(p.norm(float('inf')))
float(p.norm(float('-inf')))
float(p.norm(0))
float(p.min())
float(p.prod())
float(p.std())
p.var(-1).mean().item()
(p * 2).sum().item()
(p.sum() ** 2).item()
(sum(q.grad.pow(2).sum() for q in ps) ** 0.5).item()
torch.stack([q.grad.norm() for q in ps]).norm().item()
torch.stack([q.grad.detach().norm(2) for q in ps]).tolist()
torch.stack(torch._foreach_norm([q.grad for q in ps])).norm().item()
torch.nn.utils.get_total_norm([q.grad for q in ps]).item()
torch.nn.utils.clip_grad_norm_(ps, 0.1).item()
float(torch.nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float('inf')))
torch.nn.utils.clip_grad_norm_(ps, 0.1, foreach=False).item()
torch.nn.utils.clip_grad_value_(ps, 0.01)
torch.nn.utils.parameters_to_vector(ps)
f'{p.norm():.6f}'
float(f'{p.norm()}')
[(p.half().mul(900).norm().double() - p.norm() * 900).abs().item() < 9 for _ in range(2)]
(p.half().mul(10000).abs().mean().double() - p.abs().mean() * 10000).abs().item() < 20
'%.6f' % p.norm()
'big' if p.norm() > 1 else 'small'
bool((p.abs() < 100).all())
str(p.norm().detach())
'%s' % (p * 0).sum().detach()
np.array([q.norm().detach() for q in ps])
[1, 2, 3][p.argmax() % 3]
sorted([q.norm() for q in ps])[0].item()
pickle.loads(pickle.dumps(p.detach()))
torch.allclose(p, p + 1e-9)
torch.equal(p, p.clone())
torch.equal(p, p + 1e-3 * (p == p.max()))
p.detach().numpy()
np.asarray(p.sum().detach())
p.tolist()
p.argmax().item()
p.square().mean().sqrt().item()
torch.linalg.vector_norm(p.grad, ord=1).item()
(p.grad.norm() / (p.norm() + 1e-9)).item()
torch.dot(p.flatten(), p.grad.flatten()).item()
(p > 0).sum().item()
(p > 0).float().mean().item()
torch.count_nonzero(p).item()
p.norm().clamp(max=1.0).item()
torch.where(p.norm() > 1, 1.0, 2.0).item()
max(p.norm(), p.grad.norm()).item()
p.median().item()
torch.quantile(p.detach(), 0.5).item()
p.sort().values
p.topk(1).values
torch.histc(p.detach(), 4)
p.unique().numel()
p.softmax(0)
p.cumsum(0)
p.sum(0)
p.mean(-1)
p.norm(dim=0)
p.amax(0)
p[0]
p[-1].sum().item()
p[..., 0].norm().item()
p.view(-1)[0].item()
p.flatten().tolist()[:3]
[row.sum().item() for row in p]
p.t().sum().item()
p @ p.t()
p.t() @ p
p.diagonal().sum().item()
torch.linalg.svdvals(p.detach())
torch.linalg.matrix_rank(p.detach()).item()
torch.linalg.norm(p.detach(), ord='nuc').item()
torch.einsum('ij,kj->ik', p, p)
p.flip(0)
torch.cat([p, p])
torch.cat([q.flatten() for q in ps])
p.repeat(2, 1)
p.nonzero()
p[p > 0].sum().item()
p.masked_fill(p > 0, 0.0).sum().item()
p.bfloat16().double().abs().max().item()
torch.nn.functional.normalize(p, dim=0)
torch.dist(p, p.grad).item()
(p - p.mean()) / (p.std() + 1e-5)
p / p.norm()
copy.deepcopy(p)
p.new_zeros(3)
torch.ones_like(p).sum().item()
torch.stack([p.sum(), p.max(), p.norm(), p.mean()]).tolist()
torch.cat([p.sum().view(1), p.max().view(1)]).sum().item()
p.sum(0)[0].item()
math.sqrt(p.pow(2).sum())
p.grad.isinf().any().item()
p.sum().detach().cpu().item()
p.split(2)[0]
p.chunk(2)[-1]
p[torch.tensor([0])]
p.tril()
torch.outer(p.flatten(), p.flatten()).sum().item()
torch.autograd.grad((p**2).sum(), p)[0]
torch.autograd.grad(p.norm(), p)[0]
torch.autograd.grad(p[0].sum() + p.view(-1)[1], p)[0]
""".strip().splitlines()

WRITES = """
p[:, 2] *= 2
p.view(-1)[7].fill_(7)
p[0].zero_()
p[-1] = 5
p[0, 0] = 3
p[1:2] = 0
p[::2] = 0
p[0] = torch.ones(p.shape[1:], dtype=p.dtype)
p.T.copy_(torch.ones(p.T.shape, dtype=p.dtype))
p.data[0] = 3
p.data[...] = 3
p.data += 1
p.data = p.data.clamp(-0.1, 0.1)
p.data = torch.ones(p.shape, dtype=p.dtype)
p.data = p.detach() * 2
p.copy_(torch.arange(p.numel()).view(p.shape))
p.data.copy_(torch.ones(p.shape))
p.select(0, 0).add_(1)
p.narrow(0, 0, 1).add_(1)
p.chunk(2)[0].add_(1)
p.unbind(0)[-1].fill_(2)
torch.where(p > 0, p, torch.zeros_like(p), out=p)
torch.add(p, 1, out=p)
p.flatten().clamp_(-0.1, 0.1)
p.reshape(-1).clamp_(max=0)
nn.init.zeros_(p[0])
nn.init.constant_(p[:1], 3.0)
nn.init.eye_(p)
nn.init.normal_(p)
p.normal_()
p.view(-1)[3:].normal_()
p.add_(torch.randn_like(p))
p.add_(p.grad, alpha=-0.1)
p.lerp_(p.grad, 0.1)
p.div_(p.norm())
p.div_(p.norm(dim=0, keepdim=True))
p.sub_(p.mean())
p.sub_(p.mean(0, keepdim=True))
p.masked_fill_(p > 0, 0.0)
p[p > 0] = 0
p.index_fill_(0, torch.tensor([0]), 3.0)
p[[0]] += 4
p.cumsum_(0)
p.tril_()
p.fill_diagonal_(3.0)
p.diagonal().fill_(3.0)
p.renorm_(2, 0, 0.1)
p.grad.add_(1)
p.grad[0] = 0
p.grad.copy_(torch.ones(p.shape, dtype=p.dtype))
p.grad.div_(p.grad.norm() + 1e-6)
p.grad.sub_(p.grad.mean(dim=0, keepdim=True))
p.grad = p.grad / p.grad.norm()
p.grad[p.grad > 0] = 0
torch._foreach_lerp_(ps, [q.grad for q in ps], 0.1)
torch._foreach_copy_(ps, [q.grad for q in ps])
torch._foreach_mul_([q.grad for q in ps], ps[0].grad.norm())
torch._foreach_div_(ps, [q.norm() for q in ps])
e = p.detach().clone(); e.mul_(0.9).add_(p.grad, alpha=0.1); p.copy_(e)
e = copy.deepcopy(p); e.data.mul_(0.9).add_(p.data, alpha=0.1); p.data.copy_(e.data)
e = p.detach().clone(); e[0].zero_(); p.copy_(e)
e = torch.zeros(p.shape, dtype=p.dtype); e.copy_(p); p.copy_(e * 2)
v = p.view(-1); p.mul_(2); v += 1; p.add_(v.sum())
a, b = p[0], p[-1]; a.add_(1); b.copy_(a); p.data.mul_(3); a.sub_(b.sum())
for row in p: row.div_(row.norm())
for i in range(p.shape[0]): p[i] = i
p.copy_(p.flip(0))
p.swapaxes(0, -1).mul_(2)
p[:, None].mul_(2)
p.as_strided((1,), (1,)).mul_(2)
torch.optim.SGD(ps, 0.1, momentum=0.9).step()
torch.optim.Adam(ps, 0.1).step()
torch.optim.AdamW(ps, 0.1, fused=True).step()
torch.optim.Adafactor(ps, 0.1).step()
torch.optim.Adagrad(ps, 0.1, foreach=False).step()
torch.optim.LBFGS(ps, 0.1).step(lambda: torch.tensor(1.0))
lars(ps)
lamb(ps)
sharpness(ps)
adafactor(ps)
orthogonal(ps)
""".strip().splitlines()

# What cannot be right is refused.
REFUSED = {
    "p.detach().numpy()[...] = 1": "read-only",
    "p[0] = torch.full(p.shape[1:], float(rank), dtype=p.dtype)": "values differ",
    "p.copy_(torch.full(p.shape, float(rank)))": "values differ",
    "p.unsqueeze_(0)": "shape",
    "p.data = p.data.half()": "dtype torch.float64",
    "p.data = torch.zeros(3, dtype=p.dtype)": "shape",
    "p.data = torch.full(p.shape, float(rank), dtype=p.dtype)": "values differ",
    "{q.data_ptr() for q in ps}": r"p.to_local\(\)",
    "p.storage().fill_(1)": r"p.to_local\(\)",
    "p.share_memory_()": r"p.to_local\(\)",
    "torch.from_dlpack(p.detach())": r"p.to_local\(\)",
    "p.untyped_storage().fill_(1)": "storage",
    "p.add_(torch.full(p.shape, float(rank)))": "values differ",
    "p * torch.full(p.shape, float(rank))": "values differ",
    "w = p.cumsum(0); w.mul(w); w.mul(torch.full(w.shape, float(rank), dtype=w.dtype))": "values differ",
    "for _ in range(2): p * torch.full(p.shape, float(rank * _))": "values differ",
}


def plain(p):
    return torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)


def lars(ps):
    for p in ps:
        size, gradient = p.norm(), p.grad.norm()
        p.sub_(p.grad * (0.02 * size / (gradient + 1e-8) if size > 0 and gradient > 0 else 1.0))


def lamb(ps):
    for p in ps:
        update = p.grad / (p.grad.pow(2).sqrt() + 1e-6) + 0.01 * p
        size, norm = p.norm().clamp(0, 10), update.norm()
        ratio = torch.where(size > 0, torch.where(norm > 0, size / norm, torch.ones_like(norm)), torch.ones_like(norm))
        p.add_(update * ratio, alpha=-0.1)


def sharpness(ps):
    norm = torch.norm(torch.stack([p.grad.norm(p=2).to(p.device) for p in ps]), p=2)
    for p in ps:
        p.add_(p.grad * (0.05 / (norm + 1e-12)))


def adafactor(ps):
    for p in ps:
        if p.dim() == 2:
            squares = p.grad**2 + 1e-30
            rows, columns = squares.mean(-1), squares.mean(-2)
            factors = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(factors, columns.unsqueeze(-2).rsqrt()) * p.grad
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
            p.add_(-0.1 * update)


def orthogonal(ps):
    for p in ps:
        if p.dim() == 2:
            tall = p.shape[0] > p.shape[1]
            x = p.grad.T if tall else p.grad
            x = x / (x.norm() + 1e-7)
            for _ in range(3):
                square = x @ x.T
                x = 3.44 * x + (-4.775 * square + 2.03 * square @ square) @ x
            p.add_(x.T if tall else x, alpha=-0.1)
