"""What the models' own plans split: every parameter that is not named here stays whole."""

from __future__ import annotations

import pytest

from examples.models import convnet, gpt2, llama, mlp, vit
from shardc.ir.mesh import Mesh
from shardc.plan import resolve_params

MLP = {"layers.{}.up.weight": "[64@tp,32]", "layers.{}.up.bias": "[64@tp]", "layers.{}.down.weight": "[32,64@tp]"}
LLAMA = {
    "embed.weight": "[64@tp,64]",
    "layers.{}.attn.wq.weight": "[64@tp,64]",
    "layers.{}.attn.wk.weight": "[32@tp,64]",
    "layers.{}.attn.wv.weight": "[32@tp,64]",
    "layers.{}.attn.wo.weight": "[64,64@tp]",
    "layers.{}.mlp.gate.weight": "[128@tp,64]",
    "layers.{}.mlp.up.weight": "[128@tp,64]",
    "layers.{}.mlp.down.weight": "[64,128@tp]",
    "head.weight": "[64@tp,64]",
}
GPT2 = {
    "embed.weight": "[64@tp,64]",
    "layers.{}.attn.qkv.weight": "[(3 64@tp),64]",
    "layers.{}.attn.qkv.bias": "[(3 64@tp)]",
    "layers.{}.attn.out.weight": "[64,64@tp]",
    "layers.{}.mlp.up.weight": "[256@tp,64]",
    "layers.{}.mlp.up.bias": "[256@tp]",
    "layers.{}.mlp.down.weight": "[64,256@tp]",
}
VIT = {
    **{f"layers.{{}}.attn.{name}.weight": "[64@tp,64]" for name in "qkv"},
    **{f"layers.{{}}.attn.{name}.bias": "[64@tp]" for name in "qkv"},
    "layers.{}.attn.out.weight": "[64,64@tp]",
    "layers.{}.mlp.up.weight": "[256@tp,64]",
    "layers.{}.mlp.up.bias": "[256@tp]",
    "layers.{}.mlp.down.weight": "[64,256@tp]",
}
CONVNET = {
    f"blocks.{block}.{name}": layout
    for block, (inputs, outputs) in enumerate([(16, 16), (16, 32)])
    for name, layout in {
        "conv1.weight": f"[{outputs}@tp,{inputs},3,3]",
        "norm1.weight": f"[{outputs}@tp]",
        "norm1.bias": f"[{outputs}@tp]",
        "conv2.weight": f"[{outputs},{outputs}@tp,3,3]",
    }.items()
}


@pytest.mark.parametrize(
    ("models", "plan", "expected"),
    [
        (mlp, mlp.mlp_tp("tp"), MLP),
        (llama, llama.llama_tp("tp"), LLAMA),
        (llama, llama.llama_tp("tp", sequence=True), LLAMA),
        (gpt2, gpt2.gpt2_tp("tp"), GPT2),
        (gpt2, gpt2.gpt2_tp("tp", sequence=True), GPT2),
        (vit, vit.vit_tp("tp"), VIT),
        (vit, vit.vit_tp("tp", sequence=True), VIT),
        (convnet, convnet.convnet_channels("tp"), CONVNET),
    ],
    ids=["mlp", "llama", "llama-sp", "gpt2", "gpt2-sp", "vit", "vit-sp", "convnet"],
)
def test_plan_splits(models, plan, expected: dict[str, str]) -> None:
    model, _ = models.example()
    shapes = {name: (tuple(p.shape), p.itemsize) for name, p in model.named_parameters()}
    layouts = resolve_params(plan, Mesh(dp=2, tp=4), shapes)
    split = {name: str(layout.compute) for name, layout in layouts.items() if layout.compute.bound}
    assert split == {name.format(layer): layout for name, layout in expected.items() for layer in range(2)}
