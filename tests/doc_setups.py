"""What the documentation's fragments of Python take as given, and what is looked at after them.

A fragment runs after `BEFORE` and what its page's entry says, in one namespace with the page's other fragments.
"""

import torch
import transformers

NET = """
import torch
import torch.nn.functional as F
from torch import nn
import zero3d

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)
    def forward(self, x):
        return x + F.gelu(self.up(self.norm(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(16, 16)
    def forward(self, x):
        return self.head(self.blocks(x))

def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
batch = (x, x.argmax(-1) % 8)
"""
TRAINED = NET + 'engine = zero3d.Engine(Net, loss, "adamw", {"zero": {"level": 3}})\nengine.step(batch)\n'
TWO = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, a, b):
        return self.net(a + b)
batch = (x, x, x.argmax(-1) % 8)
def loss(output, batch):
    return F.cross_entropy(output, batch[2], reduction="sum"), len(output)
"""
MASKED = """
targets = torch.randint(0, 8, (4, 5))
targets[0] = -100
total, count = loss(torch.randn(4, 5, 8), {"targets": targets})
assert count == 15 and total.dim() == 0
"""
EMBEDDED = """
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 16)
    def forward(self, tokens):
        return self.head(self.embed(tokens))
    def resize_token_embeddings(self, number):
        self.embed = nn.Embedding(number, 16)
def loss(output, batch):
    return output.square().mean()
engine = zero3d.Engine(Tokens, loss, "adamw", {"zero": {"level": 3}})
engine.step(torch.arange(8).view(2, 4))
"""
LOADER = """
import torch
ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
loader = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}] * 2
"""
TEXTS = """
from pathlib import Path
import torch.distributed as dist
folder = Path(f"rank{dist.get_rank()}")
(folder / "texts").mkdir(parents=True)
(folder / "texts" / "a.md").write_text("words " * 50)
import os
os.chdir(folder)
"""

BEFORE: dict[str, str] = {
    "howto/model.md": NET + TWO,
    "howto/optimizers.md": NET,
    "howto/checkpoints.md": TRAINED + 'config = {"zero": {"level": 3}}\n',
    "howto/change.md": TRAINED,
    "howto/level3.md": NET,
    "howto/offload.md": NET,
    "howto/verify.md": NET + "batches = iter([batch] * 5)\n",
    "howto/transformers.md": LOADER,
    "howto/lora.md": LOADER,
    "howto/data.md": TEXTS,
}
STEPPED = "assert engine.step(batch).loss > 0"
AFTER: dict[tuple[str, int], str] = {
    ("howto/model.md", 0): STEPPED,
    ("howto/model.md", 1): MASKED,
    ("howto/optimizers.md", 0): STEPPED,
    ("howto/optimizers.md", 1): STEPPED,
    ("howto/checkpoints.md", 0): "torch.distributed.barrier()\nassert state.keys() == Net().state_dict().keys()",
    ("howto/checkpoints.md", 1): STEPPED,
    ("howto/change.md", 0): "assert not engine.weight_of('head.weight')[:, 0].any()\n" + EMBEDDED,
    ("howto/change.md", 1): "assert engine.weight_of('embed.weight').shape == (32128, 16)",
    ("howto/level3.md", 0): STEPPED,
    ("howto/level3.md", 1): STEPPED,
    ("howto/offload.md", 0): STEPPED,
    ("howto/verify.md", 0): "assert found.verdict in ('equal', 'close')",
    ("howto/transformers.md", 0): "assert tokens.shape == (1, 28)",
    ("howto/lora.md", 0): "assert report.loss > 0",
    ("howto/lora.md", 1): "import os\nassert 0 < trained < 2000 and os.path.isdir('adapters')",
    ("howto/data.md", 0): "assert Path('mine.bin').stat().st_size == 300",
    ("howto/export.md", 0): "assert callable(tensors)",
    ("howto/before.md", 0): "assert found.ranks[0].peak.total > 0",
    ("moving.md", 0): "assert loss.item() > 0",
}
"""(page, number of the fragment on it) -> what must hold."""
RANKS = {"howto/level3.md": 4, "howto/before.md": 1}
"""Where it is not two."""


def save_llama(folder: str) -> None:
    """A small causal language model as `save_pretrained` leaves it."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
    config.eos_token_id = None
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
