"""How large the example trains: the decoder and its batches."""

from models.llama import LlamaConfig

SIZES = {  # configuration, sequences per step, bytes per sequence, learning rate
    "tiny": (LlamaConfig(256, 64, 2, heads=8, kv_heads=4, hidden=128), 8, 32, 3e-3),
    "small": (LlamaConfig(256, 128, 2, heads=8, kv_heads=4, hidden=384), 16, 128, 3e-3),
    "medium": (LlamaConfig(256, 384, 6, heads=8, kv_heads=4, hidden=1024), 16, 256, 1e-3),
}
