"""Generates text with a placed model: reading the prompt and writing a token are two steps that share weights and cache.

transformers' StaticCache has a fixed size, so both steps have fixed shapes. `TorchExportableModuleWithStaticCache` makes the
cache buffers of the model, which the steps change in place. The tokens are those of the model's own `generate`. It needs
`pip install transformers`.
"""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import placewise as pw

MACHINE = pw.Cluster.load(str(Path(__file__).with_name("two_cpus.toml")))
ROWS, PROMPT, NEW = 2, 6, 12  # sequences, and tokens of each

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, 256, (ROWS, PROMPT))
expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)

cache = {"batch_size": ROWS, "max_cache_len": PROMPT + NEW}
model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
cached = TorchExportableModuleWithStaticCache(model, device="cpu", **cache).eval()

reading = pw.capture_inference(cached, {"input_ids": prompt, "cache_position": torch.arange(PROMPT)}, name="prompt")
plan = pw.place(reading, MACHINE, seconds=1)
read = plan.compile(reading, MACHINE)
writing = pw.capture_inference(cached, {"input_ids": prompt[:, :1], "cache_position": torch.arange(1)}, name="token")
write = pw.place(writing, MACHINE, evaluations=1, start=(reading, plan)).compile(writing, MACHINE)  # where its weights are

tokens = [prompt, read({"input_ids": prompt, "cache_position": torch.arange(PROMPT)})[:, -1:].argmax(-1)]
for position in range(PROMPT, PROMPT + NEW - 1):
    logits = write({"input_ids": tokens[-1], "cache_position": torch.tensor([position])})
    tokens.append(logits[:, -1:].argmax(-1))
print(f"{plan.step_seconds * 1e3:.3g} ms for the prompt, predicted")
print(f"the tokens are those of generate: {torch.equal(torch.cat(tokens, dim=1), expected)}")
read.close()
write.close()
