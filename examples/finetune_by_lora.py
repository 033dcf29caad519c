"""Fine-tunes a Llama by LoRA on a device that is too small for it: frozen weights live in the CPU's memory and visit.

    placewise place examples/finetune_by_lora.py:llama_7b --cluster 4090+3060

plans the step of a Llama of 7 billion parameters, whose weights are on the meta device, so that a laptop can plan it. As a
script this trains a small one on two CPU devices, the fast one with too little memory, and compares the losses with those of
eager PyTorch. It needs `pip install transformers` and `pip install peft`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import placewise as pw

LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}


def with_adapters(size: dict[str, int]) -> Any:
    """Returns a Llama with frozen weights in bfloat16 and trained adapters in float32, as peft makes them."""
    model = LlamaForCausalLM(LlamaConfig(**size, use_cache=False)).to(torch.bfloat16)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_dropout=0.05, target_modules="all-linear"))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Returns AdamW for the adapters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)


def captured(model: Any, tokens: torch.Tensor, autocast: torch.dtype | torch.autocast = torch.bfloat16) -> Any:
    """Returns the training step, with autocast in bfloat16: a GPU's, if only the type is named."""
    batch = {"input_ids": tokens, "labels": tokens}
    return pw.capture(model.train(), None, optimizer_of(model), batch, autocast=autocast)


def llama_7b() -> Any:
    """Returns the step of a Llama of 7 billion parameters on one sequence of 1,024 tokens."""
    with torch.device("meta"):
        model = with_adapters(LLAMA_7B)
    return captured(model, torch.zeros(1, 1024, dtype=torch.long))


def losses_of(batches: list[torch.Tensor], train_step: Any) -> list[float]:
    """Returns the loss of each batch."""
    found = []
    for number, tokens in enumerate(batches):
        torch.manual_seed(number)
        found.append(float(train_step({"input_ids": tokens, "labels": tokens})))
    return found


def eager_step_of(model: Any) -> Any:
    """Returns the same step as anyone writes it."""
    optimizer = optimizer_of(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    torch.manual_seed(0)
    model = with_adapters(SMALL).train()
    eager_model = copy.deepcopy(model)
    batches = list(torch.randint(SMALL["vocab_size"], (5, 2, 64)))

    step = captured(model, batches[0], torch.autocast("cpu", torch.bfloat16))
    machine = pw.Cluster.load(str(Path(__file__).with_name("small_and_large_cpu.toml")))
    whole = pw.place(step, machine, strategy="cpu-only")  # all on one device
    room = int(0.7 * max(whole.peak_bytes.values()))
    small = machine.limited({"cpu:0": room})
    plan = pw.place(step, small, order="program", seconds=2)  # in program order dropout draws what eager code does
    print(plan)
    print(f"with 70% of the memory ({', '.join(plan.rewrites)}) {plan.step_seconds / whole.step_seconds:.2f} times as long")

    placed = losses_of(batches, plan.compile(step, small))
    eager = losses_of(batches, eager_step_of(eager_model))
    difference = max(abs(one - other) for one, other in zip(placed, eager, strict=True))
    print(f"losses {placed[0]:.4f} to {placed[-1]:.4f}, largest difference {difference:.2g} from eager PyTorch's")
