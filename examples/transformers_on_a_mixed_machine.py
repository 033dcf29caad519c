"""Places a model of the transformers library on two different GPUs, without downloading or allocating weights.

The model is built from its configuration on the meta device, where tensors have shapes but no values, so any size works on a
laptop. The batch is cut into four micro-batches, which allows pipelines. It needs `pip install transformers`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import placewise as pw

config = LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, vocab_size=32_000)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.zeros(16, 256, dtype=torch.long)

# A dict is passed as keyword arguments, and the loss is the output's own `.loss`.
step = pw.capture(model, None, optimizer, {"input_ids": tokens, "labels": tokens}, micro_batches=4, name="small-llama")
machine = pw.Cluster.load("4090+3060")

single = pw.place(step, machine, strategy="gpu-only")
plan = pw.place(step, machine, seconds=2)
print(plan)
ratio = single.step_seconds / plan.step_seconds
print(f"the best single GPU takes {single.step_seconds * 1e3:.4g} ms, {ratio:.2f} times as long")
